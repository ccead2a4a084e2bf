// Elements, and how a part of the page is brought up to date without losing focus or selection.
// All text becomes text nodes: nothing that comes from elsewhere is ever read as HTML.

const SVG = new Set(["svg", "rect"]);

/** Returns an element. Attributes that are null or false are left out; children are nodes or text. */
export function el(tag, attributes, ...children) {
  const element = SVG.has(tag)
    ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

/** Makes an element hold these children, and keeps what there is of them. Those with data-key are known by it. */
export function show(parent, ...children) {
  const focused = document.activeElement?.id;
  children = children.flat(Infinity).filter((child) => child !== null && child !== undefined);
  const fresh = document.createDocumentFragment();
  fresh.append(...children);
  follow(parent, fresh);
  if (focused && document.activeElement?.id !== focused) {
    document.getElementById(focused)?.focus({ preventScroll: true });
  }
}

function follow(parent, fresh) {
  const keyed = new Map();
  for (const child of parent.children) {
    if (child.dataset.key !== undefined) keyed.set(child.dataset.key, child);
  }
  let place = parent.firstChild;
  for (const wanted of [...fresh.childNodes]) {
    const key = wanted.dataset?.key;
    const known = key === undefined ? (alike(place, wanted) ? place : null) : keyed.get(key);
    if (known && alike(known, wanted)) {
      keyed.delete(key);
      if (known === place) place = place.nextSibling;
      else parent.insertBefore(known, place);
      become(known, wanted);
    } else {
      parent.insertBefore(wanted, place);
    }
  }
  while (place) {
    const next = place.nextSibling;
    place.remove();
    place = next;
  }
}

function alike(known, wanted) {
  return known?.nodeName === wanted.nodeName && known.dataset?.key === wanted.dataset?.key;
}

function become(known, wanted) {
  if (known.nodeType === Node.TEXT_NODE) {
    if (known.data !== wanted.data) known.data = wanted.data;
    return;
  }
  for (const { name } of [...known.attributes]) {
    if (!wanted.hasAttribute(name)) known.removeAttribute(name);
  }
  for (const { name, value } of wanted.attributes) {
    if (known.getAttribute(name) !== value) known.setAttribute(name, value);
  }
  follow(known, wanted);
}
