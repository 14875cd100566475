"""``python -m inrun`` is the command."""

from inrun.cli.main import main

if __name__ == "__main__":
    main()
