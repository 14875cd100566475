"""The command ``inrun``: parsing and dispatch only."""
