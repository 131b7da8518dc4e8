// Looks at the page as a reader does, and leaves what it saw as JSON in an element of its own.
addEventListener("load", () => {
  const all = (root, selector) => [...root.querySelectorAll(selector)];
  const isShown = element => element.getClientRects().length > 0;
  const shownLines = () => all(document, "polyline").filter(isShown);
  // Pairs of texts that lie over each other, by a pixel or more.
  const overlaps = elements => {
    const boxes = elements.filter(isShown).map(element => [element.textContent, element.getBoundingClientRect()]);
    const meet = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1;
    return boxes.flatMap(([text, box], i) => boxes.slice(i + 1).filter(([, other]) => meet(box, other)).map(([other]) => [text, other]));
  };
  const charts = all(document, "figure.chart").map(figure => {
    const svg = figure.querySelector("svg"), box = svg.getBoundingClientRect();
    const isInside = ({ left, right, top, bottom }) => left >= box.left - 1 && right <= box.right + 1 && top >= box.top - 1 && bottom <= box.bottom + 1;
    const labels = all(svg, "text.x, text.y").filter(isShown);
    return {
      title: figure.querySelector("figcaption").textContent,
      width: box.width,
      isInside: [...labels, ...all(svg, "polyline").filter(isShown)].every(element => isInside(element.getBoundingClientRect())),
      overlaps: overlaps(labels),
    };
  });
  const point = (figure, place) => {
    const svg = figure.querySelector("svg"), box = svg.getBoundingClientRect(), unit = box.width / svg.viewBox.baseVal.width;
    const [left, right, top, bottom] = svg.dataset.box.split(" ").map(Number);
    const at = { clientX: box.left + (left + place * (right - left)) * unit, clientY: box.top + (top + bottom) / 2 * unit, bubbles: true };
    svg.dispatchEvent(new PointerEvent("pointermove", at));
    const hover = figure.querySelector(".hover");
    return isShown(hover) ? [...hover.children].map(row => row.textContent.trim()) : null;
  };
  const losses = document.querySelector("figure.chart");
  const seen = { errors: window.errors, charts, width: innerWidth, scrollWidth: document.documentElement.scrollWidth };
  seen.hovers = [0, 0.5, 1].map(place => point(losses, place));
  losses.querySelector("svg").dispatchEvent(new PointerEvent("pointerleave"));
  seen.hoverLeft = isShown(losses.querySelector(".hover"));
  const linear = shownLines();
  seen.linear = linear.length;
  document.querySelector("#logarithmic").click();
  const logarithmic = shownLines();
  seen.logarithmic = logarithmic.length;
  seen.both = logarithmic.filter(line => linear.includes(line)).length;
  seen.logarithmicHover = point(losses, 0.5);
  document.querySelector("#show0").click();
  seen.withoutFirst = shownLines().length;
  seen.hoverWithoutFirst = point(losses, 0.5);
  all(document, "details summary").forEach(summary => summary.click());
  seen.configs = all(document, "details pre").filter(isShown).map(pre => pre.textContent);
  const out = document.createElement("pre");
  out.id = "seen";
  // No sign of markup and nothing but ASCII, so that the document's text is the JSON.
  out.textContent = JSON.stringify(seen).replace(/[^ -%'-;=?-~]/g, sign => "\\u" + sign.charCodeAt(0).toString(16).padStart(4, "0"));
  document.body.append(out);
});
