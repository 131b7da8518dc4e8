// Values under the pointer. The page says the rest without it. (No character of it may be markup: the page is XML too.)
const digits = value => Number(value.toPrecision(5)).toString();
const nearest = (points, x) => points.reduce((best, point) => Math.abs(best[0] - x) > Math.abs(point[0] - x) ? point : best);
for (const figure of document.querySelectorAll("figure.chart")) {
  const svg = figure.querySelector("svg"), hover = figure.querySelector(".hover"), cursor = figure.querySelector(".cursor");
  const [left, right, top, bottom] = svg.dataset.box.split(" ").map(Number);
  const lines = [...svg.querySelectorAll("polyline")].map(line => {
    const text = line.getAttribute("points");
    const points = text === "" ? [] : text.split(" ").map(point => point.split(",").map(Number));
    return { line, points, scale: line.parentNode.parentNode };
  });
  const value = (scale, y) => {
    const [low, high] = [Number(scale.dataset.low), Number(scale.dataset.high)];
    const place = (bottom - y) / (bottom - top);
    return scale.classList.contains("linear") ? low + place * (high - low) : low * Math.pow(high / low, place);
  };
  const hide = () => { hover.style.display = "none"; cursor.style.visibility = "hidden"; };
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const shown = lines.filter(({ line, points }) => points.length > 0 ? line.getClientRects().length > 0 : false);
    if (shown.length === 0) return hide();
    const found = shown.map(({ line, points, scale }) => ({ line, scale, point: nearest(points, x) }));
    const at = nearest(found.map(({ point }) => point), x)[0];
    const step = Math.round((at - left) / (right - left) * Number(svg.dataset.steps));
    const rows = found.map(({ line, scale, point }) => {
      const row = document.createElement("div"), swatch = document.createElement("span");
      swatch.className = "swatch " + line.parentNode.getAttribute("class");
      row.append(swatch, " " + line.dataset.label + ": " + digits(value(scale, point[1])));
      return row;
    });
    const head = document.createElement("div");
    head.textContent = "step " + step.toLocaleString("en");
    hover.replaceChildren(head, ...rows);
    hover.style.display = "block";
    const place = event.clientX - figure.getBoundingClientRect().left;
    const room = figure.clientWidth - hover.offsetWidth - 8;
    hover.style.left = Math.max(4, Math.min(place + 14, room)) + "px";
    hover.style.top = (event.clientY - figure.getBoundingClientRect().top + 14) + "px";
    cursor.setAttribute("x1", at);
    cursor.setAttribute("x2", at);
    cursor.style.visibility = "visible";
  });
}
