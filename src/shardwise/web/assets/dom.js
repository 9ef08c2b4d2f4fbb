// Elements from data. Texts are only ever text, never markup.
const SVG = "http://www.w3.org/2000/svg";

function made(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const h = (tag, attributes, ...children) => made(document.createElement(tag), attributes, children);
export const s = (tag, attributes, ...children) => made(document.createElementNS(SVG, tag), attributes, children);
export const $ = (id) => document.getElementById(id);

// A number of a document, as the command line prints it.
export const number = (answer, path, attributes = {}) =>
  h("span", { class: "num", "data-path": path, ...attributes }, answer.texts[path] ?? "unknown");
