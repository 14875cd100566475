// Tables to take away: CSV to download, and tabs between cells to paste. As in `inrun --csv`: numbers as they are, control characters
// spelt out, and an apostrophe before what a spreadsheet would take for a formula.
const FORMULA = /^ *[=+\-@\t\r\n＝＋－＠]/;
// eslint-disable-next-line no-control-regex
const spelt = (text) => text.replace(/[\u0000-\u001f\u007f-\u009f\u2028\u2029]/g, (c) => ({ "\n": "\\n", "\r": "\\r", "\t": "\\t" })[c] ?? `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
function plainCell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(value);
  return (FORMULA.test(value) ? "'" : "") + spelt(value);
}
const quotedCell = (text) => (/[",]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
const csvOf = (rows) => rows.map((row) => row.map((cell) => quotedCell(plainCell(cell))).join(",") + "\n").join("");
const tabbed = (rows) => rows.map((row) => row.map(plainCell).join("\t") + "\n").join("");

function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/csv;charset=utf-8" }));
  const file = `${data.run}-${name}`.replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[.-]+/, "").slice(0, 80);
  const link = make("a", { href: url, download: `${file || "table"}.csv` });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

// The clipboard of pages from a file may be closed to scripts; what is selected can be copied all the same.
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch (error) {
    const box = make("textarea", { class: "unseen", "aria-hidden": "true", tabindex: "-1" });
    box.value = text;
    document.body.append(box);
    box.select();
    const done = document.execCommand("copy");
    box.remove();
    return done;
  }
}

// Two buttons; rowsOf() gives the head and the rows when one is pressed, as they are shown then.
function takes(name, rowsOf) {
  const said = make("span", { class: "fine", role: "status" });
  const told = make("span", { class: "unseen", text: `: ${name}` });
  const csv = make("button", { type: "button", class: "take csv" }, "CSV", told);
  const paste = make("button", { type: "button", class: "take paste" }, "Copy", told.cloneNode(true));
  csv.addEventListener("click", () => download(name, csvOf(rowsOf())));
  paste.addEventListener("click", async () => {
    const focused = document.activeElement;
    const done = await copy(tabbed(rowsOf()));
    if (focused) focused.focus();
    said.textContent = done ? "copied" : "cannot copy here";
    setTimeout(() => { said.textContent = ""; }, 2500);
  });
  return make("span", { class: "takes" }, said, csv, paste);
}
