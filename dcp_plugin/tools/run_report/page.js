"use strict";
// Draws the charts, of which the page has the numbers, in the colours of the style sheet, and again when these change.
const charts = JSON.parse(document.getElementById("charts").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const shown = {};
const ticks = 10, labels = 12;
const heat = ["#fcf3dc", "#f4c16a", "#dd7f3c", "#a8433f", "#5a1e4d"];

function ink(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// How the traces of each type look.
const looks = {
  scatter: ({ look, colour, group, is_first }) => ({
    mode: look === "line" ? "lines+markers" : "markers",
    marker: {
      color: ink(colour), size: { line: 6, diamond: 9, x: 11 }[look], symbol: look === "line" ? "circle" : look,
      ...(look === "diamond" ? { line: { width: 1.2, color: ink("--card") } } : {}),
    },
    ...(look === "line" ? { line: { color: ink(colour), width: 2 }, legendgroup: group, showlegend: is_first } : {}),
    ...(look === "x" ? { cliponaxis: false } : {}),
  }),
  bar: ({ colour }) => ({ marker: { color: ink(colour), line: { width: 0 } } }),
  heatmap: ({ z }) => ({
    colorscale: heat.map((_, number) => [number / 4, dark.matches ? heat[4 - number] : heat[number]]),
    colorbar: { thickness: 10, len: 1, outlinewidth: 0, ticksuffix: " s", nticks: 5 },
    zmin: 0, xgap: z[0].length < 120 ? 1 : 0, ygap: z.length < 40 ? 1 : 0,
  }),
  treemap: ({ colours }) => ({
    branchvalues: "total", tiling: { pad: 1 }, maxdepth: 4, root: { color: "rgba(0,0,0,0)" },
    marker: { colors: colours.map(ink), line: { width: 1.5, color: ink("--card") }, pad: { t: 20, l: 2, r: 2, b: 2 } },
    pathbar: { visible: true, thickness: 20 }, textfont: { size: 12.5 }, texttemplate: "%{label}<br>%{customdata}",
    hovertemplate: "<b>%{label}</b><br>%{customdata}<br>%{percentRoot:.1%} of all<extra></extra>",
  }),
};

function axis(given) {
  const font = { color: ink("--soft"), size: 12 };
  return {
    gridcolor: ink("--grid"), zeroline: false, linecolor: ink("--line"), tickfont: font, automargin: true,
    fixedrange: true, ...given, title: { text: given.title, font, standoff: 10 },
  };
}

function horizontal({ saves, x }, narrow) {
  if (!saves) return x ? { title: x, nticks: ticks, tickformat: ",d" } : {};
  const every = Math.max(1, Math.ceil(saves.length / ticks));
  const at = [...saves.keys()].filter((number) => number % every === 0).filter((_, place) => !narrow || place % 2 === 0);
  return {
    title: "saves, by step", tickvals: at, ticktext: at.map((number) => saves[number]), range: [-0.6, saves.length - 0.4],
    showgrid: false,
  };
}

function vertical({ saves, y, rows }) {
  if (!rows) return { title: y, ...(saves ? { rangemode: "tozero" } : {}) };
  const at = rows <= 16 ? { tickvals: [...Array(rows).keys()] } : { nticks: 12, tickformat: "d" };
  return { title: y, autorange: "reversed", showgrid: false, ...at };
}

// Lines and labels at the failed saves and at the first saves of later trainings.
function marked(marks) {
  const colour = ({ failed }) => ink(failed ? "--red" : "--faint");
  return {
    shapes: marks.map((mark) => ({
      type: "line", x0: mark.x, x1: mark.x, yref: "paper", y0: 0, y1: 1, layer: "below",
      line: { color: colour(mark), width: 1.3, dash: mark.failed ? "dot" : "dash" },
    })),
    annotations: marks.slice(0, labels).map((mark, number) => ({
      x: mark.x, yref: "paper", y: 1 - 0.07 * (number % 2), text: mark.failed ? "failed save" : "restart",
      showarrow: false, xanchor: "left", yanchor: "top", xshift: 3, font: { size: 11.5, color: colour(mark) },
    })),
  };
}

function draw() {
  const narrow = innerWidth < 560;
  for (const [id, chart] of Object.entries(charts)) {
    const traces = chart.traces.map((trace, number) => {
      const { look, colour, colours, group, is_first, ...data } = trace;
      return {
        ...data, ...looks[trace.type](trace), ...(chart.choice ? { visible: number === (shown[id] ?? 0) } : {}),
      };
    });
    const layout = {
      height: narrow ? Math.min(chart.height, 300) : chart.height,
      margin: id === "modules" ? { l: 0, r: 0, t: 4, b: 4 } : { l: 8, r: 8, t: 8, b: 8 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: ink("--ink") },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12.5 }, traceorder: "normal" },
      hoverlabel: {
        bgcolor: ink("--card"), bordercolor: ink("--line"), font: { color: ink("--ink"), size: 12.5 }, align: "left",
      },
      hovermode: "closest", dragmode: false,
      ...(chart.saves && !chart.rows ? { barmode: "stack", bargap: 0.25 } : {}),
      ...(chart.marks ? marked(chart.marks) : {}),
      xaxis: axis(horizontal(chart, narrow)), yaxis: axis(vertical(chart)),
    };
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
