// Draws the charts of the page, and renews the content of a page that is served.
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
  const draw = () => {
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
  };
  draw();

  const seconds = Number(document.body.dataset.refresh || 0);
  if (!seconds) return;
  const content = document.getElementById("content");
  const renewed = document.getElementById("renewed");
  const live = document.getElementById("live"); // what screen readers say
  const reachable = () => [...content.querySelectorAll("a, summary, [tabindex]")];
  let last = "";
  const renew = async () => {
    try {
      const answer = await fetch("content", { cache: "no-store" });
      if (!answer.ok) throw new Error(await answer.text());
      const html = await answer.text();
      live.textContent = "";
      renewed.textContent = `Renewed at ${new Date().toISOString().slice(11, 19)} UTC, and again every ${seconds} seconds.`;
      if (html !== last && !(document.getSelection() + "")) {
        const open = [...content.querySelectorAll("details")].map((each) => each.open);
        const scrolled = [...content.querySelectorAll(".scroll, pre")].map((each) => [each.scrollLeft, each.scrollTop]);
        const heights = new Map([...content.querySelectorAll("[data-chart]")].map((each) => [each.dataset.chart, each.offsetHeight]));
        const at = [window.scrollX, window.scrollY];
        const focused = reachable().indexOf(document.activeElement);
        content.innerHTML = html;
        last = html;
        content.querySelectorAll("details").forEach((each, index) => { each.open = open[index] ?? each.open; });
        content.querySelectorAll(".scroll, pre").forEach((each, index) => { [each.scrollLeft, each.scrollTop] = scrolled[index] ?? [0, 0]; });
        content.querySelectorAll("[data-chart]").forEach((each) => { each.style.minHeight = `${heights.get(each.dataset.chart) || 0}px`; });
        draw();
        reachable()[focused]?.focus({ preventScroll: true });
        window.scrollTo(...at);
      }
    } catch (error) {
      live.textContent = `Not renewed: ${error.message || error}`;
    }
    setTimeout(renew, seconds * 1000);
  };
  setTimeout(renew, seconds * 1000);
})();
