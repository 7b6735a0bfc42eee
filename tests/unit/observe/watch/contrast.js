// What is below WCAG 2's AA in contrast with its background: visible texts (1.4.3) and the lines of charts (1.4.11).
(() => {
  const parse = (text) => {
    const numbers = text.match(/[\d.]+/g).map(Number);
    return numbers.length < 4 ? [...numbers, 1] : numbers;
  };
  const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
  const luminance = (color) => {
    const [r, g, b] = color.slice(0, 3).map((value) => {
      value /= 255;
      return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (a, b) => {
    const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  // an element's colours from its ancestors' to its own; a gradient has one for each of its stops
  const backgrounds = (element) => {
    let found = [[255, 255, 255, 1]];
    const chain = [];
    for (let one = element; one; one = one.parentElement) chain.unshift(one);
    for (const one of chain) {
      const style = getComputedStyle(one);
      found = found.map((under) => over(parse(style.backgroundColor), under));
      const stops = style.backgroundImage.match(/rgba?\([^)]*\)/g);
      if (stops) found = found.flatMap((under) => stops.map((stop) => over(parse(stop), under)));
    }
    return found;
  };
  const low = {};
  let texts = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const text = walker.currentNode.textContent.trim();
    if (!text || element.closest("script, style") || !element.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    texts += 1;
    const style = getComputedStyle(element);
    const color = parse(element instanceof SVGElement ? style.fill : style.color);
    for (let one = element; one; one = one.parentElement) color[3] *= Number(getComputedStyle(one).opacity);
    const size = parseFloat(style.fontSize);
    const isLarge = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    const worst = Math.min(...backgrounds(element).map((under) => ratio(over(color, under), under)));
    if (worst < (isLarge ? 3 : 4.5)) low[`${element.tagName}.${element.getAttribute("class")} ${text.slice(0, 30)}`] = worst.toFixed(2);
  }
  for (const line of document.querySelectorAll("polyline.line, polyline.trend")) {
    const under = backgrounds(line)[0];
    const found = ratio(over(parse(getComputedStyle(line).stroke), under), under);
    if (found < 3) low[line.getAttribute("stroke")] = found.toFixed(2);
  }
  return { texts, low };
})();
