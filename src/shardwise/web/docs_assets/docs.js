// "Try it": the planner in the page, started by a click. Without this script the link leads to the planner itself.
for (const link of document.querySelectorAll("p.try a")) {
  link.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    const address = new URL(link.href), frame = document.createElement("iframe");
    address.search = "?compact";
    frame.src = address.href;
    frame.className = "planner";
    frame.title = `Planner: ${link.dataset.command}`;
    link.closest("p").replaceWith(frame);
    frame.focus();
  });
}
