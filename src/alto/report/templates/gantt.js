"use strict";
(function () {
  // A report holds its figure; the dashboard of a service brings it, and newer ones later: altoGantt.show.
  const written = document.getElementById("figure");
  let figure = written ? JSON.parse(written.textContent) : null;
  // plotly.js would offer a button that uploads the figure's data; a report never leaves the machine by itself.
  const config = {
    showSendToCloud: false, plotlyServerURL: "", displaylogo: false, responsive: true,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
  };
  const hues = ["training", "best", "overfitting", "collapsed", "parked", "diverging", "stopped"];
  const colour = (role) => getComputedStyle(document.documentElement).getPropertyValue("--" + role).trim();
  const margins = { l: 96, r: 24 };

  // A name that is longer than its bar is cut off; below four characters plotly.js leaves it out, until one zooms in.
  function fitted(trace) {
    const last = Math.max(...figure.traces.map((each) => each.base.reduce((end, base, bar) => Math.max(end, base + each.x[bar]), 0)));
    const pixels = (document.getElementById("gantt").clientWidth - margins.l - margins.r) / last;
    return trace.text.map((name, bar) => {
      const room = Math.floor((trace.x[bar] * pixels - 12) / 6.5);
      return name.length <= room || room < 4 || name.includes("&") ? name : name.slice(0, room - 1) + "…";
    });
  }

  function draw() {
    if (figure === null) return undefined;
    const lanes = figure.lanes.length;
    const axis = { gridcolor: colour("grid"), linecolor: colour("line"), tickcolor: colour("line"), zeroline: false };
    const isBroken = figure.gaps.length && document.getElementById("gantt").clientWidth < 560; // a title in two lines
    const axisTitle = figure.unit + " since the start" + (figure.gaps.length ? "," + (isBroken ? "<br>" : " ") + "interruptions cut out" : "");
    const top = figure.gaps.length ? 56 : 16; // room for the words over a gap, below the toolbar
    const bottom = isBroken ? 74 : 52;
    const layout = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest", dragmode: "zoom",
      uirevision: "kept", // what a reader zoomed into stays so when a newer figure is shown
      font: { family: "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", size: 13, color: colour("soft") },
      hoverlabel: { bgcolor: colour("panel"), bordercolor: colour("line"), font: { color: colour("ink") }, align: "left" },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("pending"), activecolor: colour("soft") },
      height: Math.min(1400, 42 + top + bottom + lanes * (figure.isCompared ? 44 : 30)), margin: { ...margins, t: top, b: bottom },
      barmode: "overlay", showlegend: false, uniformtext: { minsize: 10, mode: "hide" },
      xaxis: Object.assign({ title: { text: axisTitle, standoff: 12 }, rangemode: "tozero" }, axis),
      yaxis: Object.assign({}, axis, {
        tickvals: figure.lanes.map((_, lane) => lane), ticktext: figure.lanes, showgrid: false, ticks: "",
        range: [lanes - 0.5, -0.5],
      }),
    };
    layout.shapes = figure.gaps.map(([x]) => ({
      type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", line: { color: colour("ink"), width: 1.5, dash: "4px,4px" },
    }));
    layout.annotations = figure.gaps.map(([x, text]) => ({
      x: x, y: 1, yref: "paper", yanchor: "bottom", showarrow: false, text: text, font: { size: 12, color: colour("ink") },
    }));
    const place = new Map(figure.lanes.map((name, lane) => [name, lane]));
    const traces = figure.traces.map((trace) => {
      const isPlan = trace.meta.kind === "planned";
      const width = isPlan && figure.isCompared ? 0.22 : figure.isCompared ? 0.5 : 0.72;
      const shift = !figure.isCompared ? 0 : isPlan ? -0.3 : 0.1;
      const hue = hues[trace.meta.hue % hues.length];
      return {
        type: "bar", orientation: "h", base: trace.base, x: trace.x, y: trace.y.map((name) => place.get(name) + shift), width: width,
        text: isPlan && figure.isCompared ? undefined : fitted(trace), textposition: "inside", insidetextanchor: "middle", constraintext: "inside",
        customdata: trace.customdata, hovertemplate: "%{customdata}<extra></extra>",
        textfont: { size: 11, color: colour(["overfitting", "parked"].includes(hue) ? "on-light" : "paper") },
        marker: {
          color: colour(hue), opacity: isPlan && figure.isCompared ? 0.45 : 1,
          line: { color: colour("paper"), width: 1 },
        },
      };
    });
    document.getElementById("gantt").style.height = layout.height + "px"; // else it shrinks when the window is resized
    return Plotly.react("gantt", traces, layout, config);
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("resize", draw);
  window.altoGantt = {
    show: (found) => {
      figure = found;
      draw();
    },
  };
  draw();
})();
