// Texts and elements of the pages of a run and of a folder of runs.
"use strict";

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\u{e0000}-\u{e007f}]/gu;

/** The text with control, bidi, zero-width and lone-surrogate characters as escapes, cut at `limit` characters. */
function visible(text, limit = 2000) {
  const shown = String(text), cut = shown.length > limit ? shown.slice(0, limit) : shown;
  const escaped = cut.replace(HIDDEN, (c) => {
    const code = c.codePointAt(0);
    return code > 0xffff ? `\\u{${code.toString(16)}}` : `\\u${code.toString(16).padStart(4, "0")}`;
  });
  return cut === shown ? escaped : `${escaped} … (${(shown.length - limit).toLocaleString("en")} more characters)`;
}

/** An element with attributes (a function is a listener) and children (strings become text). */
function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((c) => c !== null && c !== undefined).map((c) => (c instanceof Node ? c : visible(c))));
  return made;
}

const $ = (selector) => document.querySelector(selector);
const known = (value) => typeof value === "number" && Number.isFinite(value);

/** A number as people write it: four digits, no exponent where it can be avoided. */
function number(value) {
  if (!known(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e7 || size < 1e-4) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

function duration(seconds) {
  if (!known(seconds)) return "–";
  if (seconds < 0.1 && seconds > 0) return seconds < 1e-3 ? `${Number((1e6 * seconds).toPrecision(3))} µs` : `${Number((1e3 * seconds).toPrecision(3))} ms`;
  if (seconds < 60) return `${Number(seconds.toPrecision(3))} s`;
  const [h, m, s] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, Math.floor(seconds % 60)];
  return h ? `${h} h ${String(m).padStart(2, "0")} min` : `${m} min ${String(s).padStart(2, "0")} s`;
}

const percent = (share) => (known(share) ? `${(100 * share).toFixed(share < 0.0995 && share > 0 ? 1 : 0)} %` : "–");
