"use strict";
// Draws the charts that the page describes, in the colours of the style sheet, and again when these change.
const charts = JSON.parse(document.getElementById("charts").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const shown = {};

function coloured(value, style, name) {  // only colours: any other text may be somebody's
  if (typeof value === "string") {
    return (name === "color" || name === "colors") && value.startsWith("--") ? style.getPropertyValue(value).trim() : value;
  }
  if (Array.isArray(value)) return value.map((one) => coloured(one, style, name));
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, coloured(one, style, key)]));
}

function axis(given, style) {
  const ink = { color: style.getPropertyValue("--soft").trim(), size: 12 };
  return {
    gridcolor: style.getPropertyValue("--grid").trim(), zeroline: false, linecolor: style.getPropertyValue("--line").trim(),
    tickfont: ink, automargin: true, fixedrange: true, ...given, title: { text: given.title, font: ink, standoff: 10 },
  };
}

function draw() {
  const style = getComputedStyle(document.documentElement);
  const narrow = innerWidth < 560;
  for (const [id, chart] of Object.entries(charts)) {
    const traces = coloured(chart.traces, style).map((trace, number) => ({
      ...trace,
      ...(chart.choice ? { visible: number === (shown[id] ?? 0) } : {}),
      ...(trace.colorscale ? { colorscale: trace.colorscale[dark.matches ? "dark" : "light"] } : {}),
    }));
    const given = coloured(chart.layout, style);
    const layout = {
      height: narrow ? Math.min(chart.height, 300) : chart.height,
      margin: { l: 8, r: 8, t: 8, b: 8 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: style.getPropertyValue("--ink").trim() },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12.5 }, traceorder: "normal" },
      hoverlabel: { bgcolor: style.getPropertyValue("--card").trim(), bordercolor: style.getPropertyValue("--line").trim(),
        font: { color: style.getPropertyValue("--ink").trim(), size: 12.5 }, align: "left" },
      hovermode: "closest", dragmode: false, ...given,
      xaxis: axis(given.xaxis ?? {}, style), yaxis: axis(given.yaxis ?? {}, style),
    };
    if (narrow && layout.xaxis.tickvals) {
      const keep = (_, number) => number % 2 === 0;
      layout.xaxis.ticktext = layout.xaxis.ticktext.filter(keep);
      layout.xaxis.tickvals = layout.xaxis.tickvals.filter(keep);
    }
    Plotly.react(id, traces, layout, { displayModeBar: false, responsive: true });
  }
  document.documentElement.dataset.drawn = String(Object.keys(charts).length);
}

for (const button of document.querySelectorAll("[data-chart]")) {
  button.addEventListener("click", () => {
    shown[button.dataset.chart] = Number(button.dataset.trace);
    for (const one of button.parentElement.children) one.setAttribute("aria-pressed", String(one === button));
    draw();
  });
}
dark.addEventListener("change", draw);
draw();
