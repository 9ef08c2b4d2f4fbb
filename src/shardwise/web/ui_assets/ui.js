"use strict";
// Charts of a few lines, and the live metrics of one run. Nothing here writes HTML: texts are set as text.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const MOST = 4000; // points that are kept of a live run; every second one is dropped above

  function make(name, attributes, text) {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  }

  function short(value) {
    const size = Math.abs(value);
    if (size >= 1e6) return `${(value / 1e6).toPrecision(3)} M`;
    if (size >= 1e4) return `${(value / 1e3).toPrecision(3)} k`;
    return size >= 100 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
  }

  function draw(box, series) {
    const shown = series.map((one) => one.points.filter((point) => point[0] !== null && point[1] !== null));
    const all = shown.flat();
    const width = Math.max(box.clientWidth, 120), height = box.clientHeight;
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
    if (!all.length) {
      svg.append(make("text", { x: 0, y: 20 }, "No value yet."));
      box.replaceChildren(svg);
      return;
    }
    let [left, right, low, high] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const [x, y] of all) {
      left = Math.min(left, x); right = Math.max(right, x); low = Math.min(low, y); high = Math.max(high, y);
    }
    if (low === high) { low -= Math.abs(low) * 0.05 || 1; high += Math.abs(high) * 0.05 || 1; }
    const frame = { left: 58, right: width - 12, top: 10, bottom: height - 26 };
    const at = (x) => frame.left + (right === left ? 0.5 : (x - left) / (right - left)) * (frame.right - frame.left);
    const up = (y) => frame.bottom - ((y - low) / (high - low)) * (frame.bottom - frame.top);
    for (const share of [0, 0.5, 1]) {
      const y = low + share * (high - low);
      svg.append(make("line", { x1: frame.left, x2: frame.right, y1: up(y), y2: up(y) }));
      svg.append(make("text", { x: frame.left - 8, y: up(y) + 4, "text-anchor": "end" }, short(y)));
    }
    svg.append(make("text", { x: frame.left, y: height - 6 }, `step ${left.toLocaleString("en")}`));
    if (right > left) svg.append(make("text", { x: frame.right, y: height - 6, "text-anchor": "end" }, right.toLocaleString("en")));
    shown.forEach((points, index) => {
      if (!points.length) return;
      const path = points.map(([x, y]) => `${at(x).toFixed(1)},${up(y).toFixed(1)}`).join(" ");
      svg.append(make("polyline", { points: path, class: `k${index + 1}` }));
      const [x, y] = points[points.length - 1];
      svg.append(make("circle", { cx: at(x), cy: up(y), r: 3.5, class: `k${index + 1}` }));
    });
    box.replaceChildren(svg);
  }

  function seconds(value) {
    return value >= 10 ? `${value.toFixed(1)} s` : value >= 0.1 ? `${Math.round(value * 1000)} ms` : `${(value * 1000).toFixed(1)} ms`;
  }

  function live(section) {
    const columns = JSON.parse(section.dataset.columns);
    const status = section.querySelector("[data-status]");
    const tile = (name) => section.querySelector(`[data-tile=${name}]`);
    let rows = [], note = "", source = null, waiting = false;

    function show() {
      waiting = false;
      const points = (name) => rows.map((row) => [row.step, row[name]]);
      const noun = rows.some((row) => row.samples_per_s !== null) ? "samples" : "tokens";
      for (const element of section.querySelectorAll("[data-noun]")) element.textContent = `${noun}/s`;
      draw(section.querySelector("[data-chart=loss]"), [{ points: points("loss") }]);
      draw(section.querySelector("[data-chart=per_s]"), [{ points: points(`${noun}_per_s`) }]);
      const last = rows[rows.length - 1];
      if (!last) return;
      const text = (value, format) => (value === null ? "unknown" : format(value));
      tile("step").textContent = text(last.step, (value) => value.toLocaleString("en"));
      tile("loss").textContent = text(last.loss, (value) => value.toFixed(3));
      tile("per_s").textContent = text(last[`${noun}_per_s`], short);
      tile("step_time_s").textContent = text(last.step_time_s, seconds);
    }

    function later() {
      if (!waiting) { waiting = true; requestAnimationFrame(show); }
    }

    function say(text) {
      status.textContent = note ? `${text} Note: ${note}.` : text;
    }

    function open() {
      rows = [];
      source = new EventSource(section.dataset.events);
      source.addEventListener("open", () => { rows = []; say("Connected; new steps appear as they are logged."); later(); });
      source.addEventListener("restart", () => { rows = []; later(); });
      source.addEventListener("note", (event) => { note = JSON.parse(event.data).text; say("Connected; new steps appear as they are logged."); });
      source.addEventListener("rows", (event) => {
        for (const row of JSON.parse(event.data)) rows.push(Object.fromEntries(columns.map((name, i) => [name, row[i]])));
        while (rows.length > MOST) rows = rows.filter((_, i) => i % 2 || i === rows.length - 1);
        later();
      });
      source.addEventListener("error", () => {
        say(source.readyState === EventSource.CLOSED ? "Not connected: the server refused; reload the page to try again." : "Connection lost; trying again.");
      });
    }

    // a tab in the background gives its connection back: browsers allow six to one server
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) { source?.close(); source = null; } else if (!source) open();
    });
    addEventListener("resize", later);
    addEventListener("pagehide", () => source?.close());
    open();
  }

  for (const box of document.querySelectorAll("[data-series]")) {
    const series = JSON.parse(box.dataset.series);
    const again = () => draw(box, series);
    again();
    addEventListener("resize", again);
  }
  for (const section of document.querySelectorAll("[data-events]")) live(section);
  for (const form of document.querySelectorAll("form[data-most]")) {
    const button = form.querySelector("button");
    const boxes = [...form.querySelectorAll("input[type=checkbox]")];
    const check = () => {
      const marked = boxes.filter((box) => box.checked).length;
      button.disabled = marked < 2;
      for (const box of boxes) box.disabled = !box.checked && marked >= Number(form.dataset.most);
    };
    form.addEventListener("change", check);
    check();
  }
})();
