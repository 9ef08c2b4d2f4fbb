// The system's colours, or those that the reader has chosen here; and what to do where the page is opened as a file.
(() => {
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try { chosen = localStorage.getItem("shardwise-theme"); } catch { /* no storage: the system's */ }
  const apply = () => { document.documentElement.dataset.theme = chosen || (system.matches ? "dark" : "light"); };
  apply();
  if (new URLSearchParams(location.search).has("compact")) document.documentElement.dataset.layout = "compact"; // in a page of the docs
  system.addEventListener("change", apply);
  addEventListener("DOMContentLoaded", () => {
    const status = document.getElementById("status");
    if (location.protocol === "file:" && status) // no browser loads a module from a file, so planner.js cannot say it
      status.textContent = "Browsers do not let a page from a file run the planner. Serve the folder, for example with: python -m http.server -d build/site";
    document.getElementById("theme")?.addEventListener("click", () => {
      chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
      try { localStorage.setItem("shardwise-theme", chosen); } catch { /* until the page is left */ }
      apply();
    });
  });
})();
