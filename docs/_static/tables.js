// Give each cell the heading of its column, which site.css shows on a phone, where a row is a block.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table.docutils")) {
    const headings = [...table.querySelectorAll("thead th")].map((heading) => heading.textContent.trim());
    if (headings.length < 3) continue;
    table.classList.add("blocks");
    if (headings.length > 4) table.classList.add("many");
    for (const row of table.querySelectorAll("tbody tr")) {
      [...row.cells].forEach((cell, column) => {
        cell.dataset.heading = cell.textContent.trim() ? headings[column] || "" : "";
      });
    }
  }
});
