// Draws the figures that the page carries, in the page's colours. Asks no network for anything.
(() => {
  "use strict";
  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const touch = window.matchMedia("(pointer: coarse)").matches;
  const button = document.getElementById("theme");
  let chosen = null;

  // Colours are names of variables of the style sheet, such as "var:accent".
  function resolved(value, styles) {
    if (typeof value === "string") {
      return value.startsWith("var:") ? styles.getPropertyValue("--" + value.slice(4)).trim() : value;
    }
    if (Array.isArray(value)) return value.map((item) => resolved(item, styles));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, resolved(item, styles)]));
  }

  // Black or white: what stands out from a colour of the form #rrggbb, by the luminance of WCAG 2.
  function legible(colour) {
    const part = (place) => {
      const value = parseInt(colour.slice(place, place + 2), 16) / 255;
      return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    };
    return 0.2126 * part(1) + 0.7152 * part(3) + 0.0722 * part(5) > 0.179 ? "#000000" : "#ffffff";
  }

  function draw() {
    root.dataset.theme = chosen ?? (dark.matches ? "dark" : "light");
    button.textContent = root.dataset.theme === "dark" ? "light page" : "dark page";
    if (!window.Plotly) return;
    const styles = getComputedStyle(root);
    for (const box of document.querySelectorAll("[data-figure]")) {
      const figure = resolved(figures[box.dataset.figure], styles);
      for (const trace of figure.data) {
        if (trace.type === "bar") trace.insidetextfont = { color: legible(trace.marker.color) };
      }
      const narrow = box.clientWidth < 560;
      figure.layout.autosize = true;
      figure.layout.hoverlabel.namelength = -1;
      if (narrow) figure.layout.font.size = 12;
      if (touch || narrow) {  // a finger scrolls the page, it does not zoom a chart
        figure.layout.dragmode = false;
        for (const key of Object.keys(figure.layout)) {
          if (/^[xy]axis/.test(key)) figure.layout[key].fixedrange = true;
        }
      }
      window.Plotly.react(box, figure.data, figure.layout, { responsive: true, displayModeBar: false });
    }
  }

  dark.addEventListener("change", draw);
  button.addEventListener("click", () => {
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    draw();
  });
  draw();
})();
