// Elements, numbers and the tip at the pointer. Only text nodes are written, so no data can become markup.

function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "class") made.className = value;
    else if (key in made) made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

function shape(name, attributes = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== "") made.textContent = text;
  return made;
}

// A cell is a text, or [text, class].
function table(rows) {
  if (!rows.length) return "";
  return element("div", { class: "scroll" }, element("table", {}, ...rows.map((row, i) =>
    element("tr", {}, ...row.map((cell, j) => {
      const [text, style] = Array.isArray(cell) ? cell : [cell, ""];
      return element(i ? "td" : "th", { class: (j ? "n " : "") + style }, text);
    })))));
}

// As whet/show/metric_catalog.py writes them.
function number(value, style = "number") {
  if (value === null || value === undefined || !isFinite(value)) return "nan/inf";
  if (style === "seconds") return seconds(value);
  if (style === "percent") return (100 * value).toFixed(1) + "%";
  const size = Math.abs(value);
  if (style === "count") {
    for (const [least, divisor, unit] of [[1e12, 1e12, "T"], [1e9, 1e9, "B"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]])
      if (size >= least) return (value / divisor).toFixed(1) + unit;
    return size >= 100 || Number.isInteger(value) ? value.toFixed(0) : value.toFixed(1);
  }
  if (size < 1e-12) return "0";
  if (size >= 1e5 || size < 1e-3) return value.toExponential(1);
  return size >= 1 ? value.toFixed(Math.max(0, 3 - Math.floor(Math.log10(size)))) : String(+value.toPrecision(3));
}

function seconds(value) {
  if (value < 59.95) return value.toFixed(value < 1 ? 2 : 1) + " s";
  const whole = Math.round(value), two = (n) => String(n).padStart(2, "0");
  if (whole < 3600) return Math.floor(whole / 60) + "m " + two(whole % 60) + "s";
  return Math.floor(whole / 3600) + "h " + two(Math.floor((whole % 3600) / 60)) + "m";
}

// A label just precise enough to distinguish the labels of an axis with this spread.
function axisLabel(value, spread, style) {
  if (style === "seconds") return seconds(value);
  if (style === "percent") return (100 * value).toFixed(spread > 0.1 ? 0 : spread > 0.01 ? 1 : 2) + "%";
  if (style === "count" || !(spread > 1e-4 && spread < 1e5) || Math.abs(value) >= 1e6) return number(value, style);
  const digits = Math.max(0, 1 - Math.floor(Math.log10(spread)));
  return (+value.toFixed(digits) + 0).toFixed(digits);
}

const tip = element("div", { class: "tip" });
document.body.append(tip);

function showTip(event, ...content) {
  tip.replaceChildren(...content);
  tip.style.display = "block";
  const box = tip.getBoundingClientRect(), below = event.clientY + 18;
  tip.style.left = Math.max(8, Math.min(event.clientX + 14, innerWidth - box.width - 8)) + "px";
  tip.style.top = (below + box.height > innerHeight ? event.clientY - box.height - 12 : below) + "px";
}

function hideTip() {
  tip.style.display = "none";
}
