// The system's colours, or those that the reader has chosen here.
(() => {
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try { chosen = localStorage.getItem("shardwise-theme"); } catch { /* no storage: the system's */ }
  const apply = () => { document.documentElement.dataset.theme = chosen || (system.matches ? "dark" : "light"); };
  apply();
  system.addEventListener("change", apply);
  addEventListener("DOMContentLoaded", () => document.getElementById("theme")?.addEventListener("click", () => {
    chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("shardwise-theme", chosen); } catch { /* until the page is left */ }
    apply();
  }));
})();
