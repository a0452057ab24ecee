"use strict";
// One metric's table at a time; without a script, and in print, all of them are there.
for (const choice of document.querySelectorAll(".metrics")) {
  const tables = choice.parentElement.querySelectorAll("[data-metric]");
  const show = () => {
    const wanted = choice.querySelector("input:checked").value;
    for (const table of tables) table.hidden = table.dataset.metric !== wanted;
  };
  choice.hidden = false;
  choice.addEventListener("change", show);
  show();
}
// A column's name sorts every group: figures from the highest first, names from the first letter.
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.parentElement, column = head.cellIndex, table = head.closest("table");
    const first = column ? "descending" : "ascending", second = column ? "ascending" : "descending";
    const order = head.getAttribute("aria-sort") === first ? second : first;
    const sign = order === "ascending" ? 1 : -1;
    const compare = (a, b) => {
      const x = a.cells[column], y = b.cells[column];
      return column ? x.dataset.value - y.dataset.value : x.textContent.localeCompare(y.textContent, "en");
    };
    for (const other of head.parentElement.cells) other.setAttribute("aria-sort", other === head ? order : "none");
    for (const body of table.tBodies) {
      const rows = [...body.rows].slice(1);
      body.append(...rows.sort((a, b) => sign * compare(a, b)));
    }
  });
}
// A link to a folded part unfolds it; print unfolds everything.
const unfold = () => {
  const part = location.hash && document.getElementById(location.hash.slice(1));
  if (part && part.tagName === "DETAILS") part.open = true;
};
addEventListener("hashchange", unfold);
unfold();
const forPrint = isPrinting => {
  for (const part of document.querySelectorAll(isPrinting ? "details:not([open])" : "details[data-folded]")) {
    part.toggleAttribute("data-folded", isPrinting);
    part.open = isPrinting;
  }
};
addEventListener("beforeprint", () => forPrint(true));
addEventListener("afterprint", () => forPrint(false));
