// Draws the charts of the page.
"use strict";
(() => {
  const text = (name) => `var(--${name})`;
  const config = {
    background: null,
    font: "system-ui, sans-serif",
    view: { stroke: null },
    axis: {
      labelColor: text("muted"), titleColor: text("muted"), gridColor: text("line"), domainColor: text("line"),
      tickColor: text("line"), labelFontSize: 12, titleFontSize: 12, titleFontWeight: 400, titlePadding: 8,
      labelLimit: 140, labelPadding: 6, tickCount: 5,
    },
    axisY: { domain: false, ticks: false },
    axisX: { grid: false, labelOverlap: true },
    legend: { labelColor: text("ink"), titleColor: text("muted"), labelFontSize: 12, titleFontSize: 12, titleFontWeight: 400, symbolType: "square" },
  };
  if (!window.vegaEmbed) return;
  const specs = JSON.parse(document.getElementById("chart-data").textContent);
  for (const place of document.querySelectorAll("[data-chart]")) {
    const spec = { width: "container", autosize: { type: "fit-x", contains: "padding" }, ...specs[place.dataset.chart] };
    const options = {
      actions: false, renderer: "svg", ast: true, defaultStyle: false, mode: "vega-lite", config,
      tooltip: { theme: "custom", disableDefaultStyle: true },
    };
    window.vegaEmbed(place, spec, options).catch((error) => { place.textContent = `The chart cannot be drawn: ${error.message}`; });
  }
})();
