"use strict";
(function () {
  // A report holds its figures; the dashboard of a service brings them, and newer ones later: altoFigures.show.
  const written = document.getElementById("figures");
  let figures = written ? JSON.parse(written.textContent) : {};
  // plotly.js would offer a button that uploads the figure's data; a report never leaves the machine by itself.
  const config = {
    showSendToCloud: false, plotlyServerURL: "", displaylogo: false, responsive: true,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
  };
  const ticks = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1];
  const fewTicks = [0.001, 0.01, 0.05, 0.25, 1]; // for a narrow window
  // Colour is never the only sign: outcomes differ in dash and marker too.
  const dashes = { overfitting: "dash", collapsed: "longdash", diverging: "dot", stopped: "dashdot", failed: "dashdot" };
  const symbols = { second: "diamond", overfitting: "diamond", collapsed: "star", diverging: "x", stopped: "square", failed: "cross" };
  const light = ["completed", "parked", "pending", "underperforming", "overfitting"]; // dark text can be read on them
  let scale = document.querySelector("[data-scale][aria-pressed=true]")?.dataset.scale;
  let mode = 0;
  const narrow = 560; // pixels
  const margins = { l: 64, r: 32 };

  const colour = (role) => {
    const style = getComputedStyle(document.documentElement);
    return (style.getPropertyValue("--" + role) || style.getPropertyValue("--soft")).trim();
  };

  function baseLayout() {
    const axis = { gridcolor: colour("grid"), linecolor: colour("line"), tickcolor: colour("line"), zeroline: false };
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest", dragmode: "zoom",
      // What a reader zoomed into or hid stays so when newer figures are shown.
      uirevision: scale,
      font: { family: "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", size: 13, color: colour("soft") },
      hoverlabel: { bgcolor: colour("panel"), bordercolor: colour("line"), font: { color: colour("ink") }, align: "left" },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("pending"), activecolor: colour("soft") },
      legend: { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom", itemsizing: "constant" },
      xaxis: Object.assign({}, axis), yaxis: Object.assign({}, axis),
    };
  }

  function styledCurve(trace) {
    const role = trace.meta.role;
    const widths = { best: 3.5, first: 2.5, second: 2.5, completed: 1.6, underperforming: 1 };
    const sizes = { best: 7, underperforming: 4 };
    return Object.assign({}, trace, {
      uid: trace.text,
      line: { color: colour(role), width: widths[role] || 1.4, dash: dashes[role] || "solid" },
      marker: { color: colour(role), size: sizes[role] || 5, symbol: symbols[role] || "circle" },
      textfont: { color: colour("soft"), size: 12 },
    });
  }

  // A box without a height of its own shrinks to its least height when the window is resized; sections would overlap.
  function show(id, traces, layout, settings) {
    document.getElementById(id).style.height = layout.height + "px";
    return Plotly.react(id, traces, layout, settings);
  }

  // Labels of rungs stand above the plot area, where no curve runs, on the lowest of heights where they touch no other;
  // those that would leave the figure are moved into it.
  function placedLabels(rungs, width, shareOf) {
    const ends = [];
    return rungs.map(([x, long, short]) => {
      const text = width < narrow ? short : long;
      const half = 3.4 * text.length + 4;
      const line = shareOf(x) * width;
      const middle = Math.min(Math.max(line, half - margins.l), width + margins.r - half);
      const free = ends.findIndex((end) => end <= middle - half);
      const height = free < 0 ? ends.length : free;
      ends[height] = middle + half;
      return { x: x, text: text, height: height, shift: middle - line };
    });
  }

  function drawCurves({ id }) {
    const figure = figures[id];
    if (!figure || !figure.view) return undefined;
    const places = [...figure.rungs.map(([x]) => x), ...figure.traces.flatMap((trace) => trace.x)];
    const first = Math.min(...places.filter((x) => x > 0));
    const room = document.getElementById(id).clientWidth - margins.l - margins.r;
    const shares = room < narrow ? fewTicks : ticks;
    const x = scale === "log"
      ? { type: "log", range: [Math.log10(first * 0.9), Math.log10(1.04)], tickvals: shares, ticktext: shares.map((t) => +(t * 100).toFixed(2) + " %") }
      : { type: "linear", range: [0, 1.02], tickformat: ".0%" };
    const exponent = (share) => (scale === "log" ? Math.log10(share) : share);
    const labels = placedLabels(figure.rungs, room, (share) => (exponent(share) - x.range[0]) / (x.range[1] - x.range[0]));
    const heights = Math.max(0, ...labels.map(({ height }) => height + 1));
    const layout = Object.assign(baseLayout(), { height: 470 + 18 * heights, margin: { ...margins, t: 48 + 18 * heights, b: 52 } });
    layout.legend.y = 1 + (8 + 18 * heights) / 370;
    // plotly.js draws gridlines over lines as high as the plot, which would hide those of rungs.
    Object.assign(layout.xaxis, x, { title: { text: "share of the job's own steps", standoff: 12 }, showgrid: !figure.rungs.length });
    const y = { title: { text: figure.yTitle, standoff: 12 }, range: figure.view.slice(), tickformat: figure.yTickFormat };
    Object.assign(layout.yaxis, y);
    layout.shapes = figure.rungs.map(([x]) => ({
      type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", layer: "below", line: { color: colour("rung"), width: 1, dash: "4px,4px" },
    }));
    // plotly.js takes places of annotations on a logarithmic axis as exponents, those of shapes as they are.
    layout.annotations = labels.map(({ x: share, text, height, shift }) => ({
      x: exponent(share), xshift: shift, y: 1, yref: "paper", yanchor: "bottom", yshift: 18 * height,
      showarrow: false, text: text, font: { size: 12 },
    }));
    return show(id, figure.traces.map(styledCurve), layout, config);
  }

  // Between two axes a line eases from one height to the next, and can be pointed at on all its way.
  function easedLine(heights) {
    const line = { x: [0], y: [heights[0]] };
    for (let axis = 1; axis < heights.length; axis += 1) {
      for (let step = 1; step <= 16; step += 1) {
        const t = step / 16;
        line.x.push(axis - 1 + t);
        line.y.push(heights[axis - 1] + (heights[axis] - heights[axis - 1]) * t * t * (3 - 2 * t));
      }
    }
    return line;
  }

  function drawParallel() {
    const figure = figures.parallel;
    if (!figure || !document.getElementById("parallel")) return undefined;
    const last = figure.axes.length - 1;
    const top = Math.max(1, ...figure.axes[last].ticks.map(([height]) => height));
    const layout = Object.assign(baseLayout(), { height: 470, margin: { l: 84, r: 104, t: 76, b: 24 }, dragmode: false });
    document.getElementById("parallel").style.minWidth = 130 * figure.axes.length + "px";
    Object.assign(layout.legend, { y: 1.12, traceorder: "normal" });
    Object.assign(layout.xaxis, { visible: false, range: [0, last], fixedrange: true });
    Object.assign(layout.yaxis, { visible: false, range: [-0.03, top + 0.03], fixedrange: true });
    layout.shapes = figure.axes.map((_, axis) => ({
      type: "line", layer: "below", x0: axis, x1: axis, y0: 0, y1: 1, line: { color: colour("rung"), width: 1 },
    }));
    layout.annotations = figure.axes.flatMap((axis, index) => [
      {
        x: index, y: 1, yref: "paper", yanchor: "bottom", yshift: 8, xanchor: "center", showarrow: false,
        text: "<b>" + axis.name + "</b>", font: { color: colour("ink") },
      },
      ...axis.ticks.map(([height, text]) => ({
        x: index, y: height, xanchor: index === last ? "left" : "right", xshift: index === last ? 7 : -7, showarrow: false,
        text: text, font: { size: 12, color: colour("ink") }, bgcolor: colour("paper"), opacity: 0.85, borderpad: 1,
      })),
    ]);
    const traces = figure.traces.map((trace) => Object.assign({}, trace, easedLine(trace.y), {
      type: "scatter", mode: "lines", hovertemplate: "%{text}<extra></extra>",
      line: { color: colour(trace.meta.role), width: trace.meta.role === "best" ? 3.5 : 1.4, dash: trace.meta.role === "not-finite" ? "dot" : "solid" },
    }));
    return show("parallel", traces, layout, Object.assign({}, config, { displayModeBar: false }));
  }

  function drawRates() {
    const figure = figures.rates;
    if (!figure || !document.getElementById("rates")) return undefined;
    const layout = Object.assign(baseLayout(), { height: 430, margin: { l: 64, r: 32, t: 48, b: 56 } });
    const ticks = figure.xTicks.length ? { tickvals: figure.xTicks.map(([x]) => x), ticktext: figure.xTicks.map(([, text]) => text) } : { tickformat: "~e" };
    Object.assign(layout.xaxis, { type: "log", title: { text: "learning rate", standoff: 12 } }, ticks);
    Object.assign(layout.yaxis, {
      title: { text: figure.yTitle + " " + figure.modes[mode].name, standoff: 12 }, range: figure.modes[mode].view.slice(), tickformat: figure.yTickFormat,
    });
    const traces = figure.traces.map((trace) => ({
      type: "scatter", mode: "markers", name: trace.name, x: trace.x, y: trace.y[mode], text: trace.text[mode], meta: trace.meta,
      hovertemplate: "%{text}<extra></extra>",
      marker: {
        color: colour(trace.meta.role), size: trace.meta.role === "best" ? 13 : 9, symbol: symbols[trace.meta.role] || "circle", opacity: 0.85,
        line: { color: colour("paper"), width: 1 },
      },
    }));
    return show("rates", traces, layout, config);
  }

  function drawSlots() {
    const figure = figures.slots;
    if (!figure || !document.getElementById("slots")) return undefined;
    const rows = Math.max(1, figure.lanes.length);
    const isBroken = figure.gaps.length && document.getElementById("slots").clientWidth < narrow; // a title in two lines
    const bottom = isBroken ? 74 : 52;
    const layout = Object.assign(baseLayout(), {
      height: Math.min(900, 84 + bottom + rows * 34), margin: { l: figure.lanes.some((lane) => lane.startsWith("rank")) ? 104 : 64, r: 32, t: 56, b: bottom }, barmode: "overlay", bargap: 0.18,
      uniformtext: { minsize: 10, mode: "hide" },
    });
    Object.assign(layout.xaxis, { title: { text: isBroken ? figure.xTitle.replace(", ", ",<br>") : figure.xTitle, standoff: 12 }, rangemode: "tozero" });
    Object.assign(layout.yaxis, {
      type: "category", autorange: "reversed", showgrid: false, ticks: "",
      categoryorder: "array", categoryarray: figure.lanes,
    });
    layout.shapes = figure.gaps.map(([x]) => ({
      type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", line: { color: colour("ink"), width: 1.5, dash: "4px,4px" },
    }));
    layout.annotations = figure.gaps.map(([x, text]) => ({
      x: x, y: 1, yref: "paper", yanchor: "bottom", showarrow: false, text: text, font: { size: 12, color: colour("ink") },
    }));
    if (figure.gaps.length) layout.legend.y = 1 + 26 / (rows * 34); // above the words over a gap
    const traces = figure.traces.map((trace) => Object.assign({}, trace, {
      marker: { color: colour(trace.meta.role), line: { color: colour("paper"), width: 1 } },
      textfont: { size: 11, color: colour(light.includes(trace.meta.role) ? "on-light" : "paper") },
    }));
    return show("slots", traces, layout, config);
  }

  const drawAllCurves = () => document.querySelectorAll(".figure[data-curves]").forEach(drawCurves);

  function draw() {
    drawAllCurves();
    drawParallel();
    drawRates();
    drawSlots();
  }

  document.querySelectorAll("[data-scale]").forEach((button) => {
    button.addEventListener("click", () => {
      scale = button.dataset.scale;
      document.querySelectorAll("[data-scale]").forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
      drawAllCurves();
    });
  });

  document.querySelectorAll("[data-mode]").forEach((button) => {
    button.addEventListener("click", () => {
      mode = Number(button.dataset.mode);
      document.querySelectorAll("[data-mode]").forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
      document.querySelectorAll("[data-mode-note]").forEach((note) => { note.hidden = note.dataset.modeNote !== button.dataset.mode; });
      drawRates();
    });
  });

  // Numbers sort as numbers, text as text; a missing value stays last in both directions.
  function compare(a, b) {
    const [x, y] = [Number(a), Number(b)];
    return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, undefined, { numeric: true }) : x - y;
  }

  function sortBy(heading) {
    const table = heading.closest("table");
    const column = heading.cellIndex;
    const direction = heading.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
    table.querySelectorAll("th[aria-sort]").forEach((other) => other.setAttribute("aria-sort", other === heading ? direction : "none"));
    const keyOf = (row) => row.cells[column].dataset.sort;
    const rows = Array.from(table.tBodies[0].rows);
    rows.sort((a, b) => {
      const [x, y] = [keyOf(a), keyOf(b)];
      if (x === "" || y === "") return (x === "") - (y === "");
      return direction === "ascending" ? compare(x, y) : compare(y, x);
    });
    table.tBodies[0].append(...rows);
  }

  // Tables of the dashboard are replaced while it is open.
  document.addEventListener("click", ({ target }) => {
    const heading = target.closest("th[aria-sort]");
    if (heading && target.closest("button")) sortBy(heading);
  });

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("resize", drawAllCurves);
  window.altoFigures = {
    show: (found) => {
      figures = found;
      draw();
    },
    sortBy: sortBy,
  };
  draw();
})();
