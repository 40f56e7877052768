// Tables of more than ten rows sort by a click on a heading and filter by a text above them.
(function () {
  const collator = new Intl.Collator("en", { numeric: true });

  // the figure that a cell begins with, without thousands separators; NaN for words
  function figure(text) {
    return /^[+-]?[\d,]*\.?\d+(%|x)?( |$)/.test(text) ? parseFloat(text.replaceAll(",", "")) : NaN;
  }

  // cells without a figure come last, whatever the direction
  function compare(one, other, sign) {
    if (one === "-" || other === "-") return (one === "-") - (other === "-");
    const figures = [figure(one), figure(other)];
    const both = figures.every((value) => !Number.isNaN(value));
    return sign * (both ? figures[0] - figures[1] : collator.compare(one, other));
  }

  function sortable(table, body) {
    table.tHead.querySelectorAll("th").forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const falls = head.getAttribute("aria-sort") === "ascending";
        table.tHead.querySelectorAll("th").forEach((each) => each.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", falls ? "descending" : "ascending");
        const text = (row) => row.cells[column].textContent.trim();
        body.append(...[...body.rows].sort((one, other) => compare(text(one), text(other), falls ? -1 : 1)));
      });
    });
  }

  function filtered(table, body) {
    const field = document.createElement("input");
    field.type = "search";
    field.placeholder = "Filter rows by words";
    field.setAttribute("aria-label", "Filter the rows of the table below");
    field.className = "rows-filter";
    field.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of body.rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      }
    });
    table.before(field);
  }

  for (const table of document.querySelectorAll(".md-content table")) {
    const body = table.tBodies[0];
    if (!table.tHead || !body || body.rows.length <= 10) continue;
    table.dataset.sorts = "";
    sortable(table, body);
    filtered(table, body);
  }
})();
