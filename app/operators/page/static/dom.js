// Elements. Text only ever becomes text: nothing that the server sends is parsed as HTML.

export const byId = (id) => document.getElementById(id);

/** An element with attributes and children; a child is an element or text, null is left out. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Sets text only where it changed, so that a selection and a screen reader are left alone. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
