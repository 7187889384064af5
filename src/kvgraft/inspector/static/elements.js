// Elements made of attributes and text; text never becomes markup.
const fill = (made, attributes, content) => {
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...(Array.isArray(content) ? content : [String(content)]));
  return made;
};

export const htmlElement = (name, attributes = {}, content = []) => fill(document.createElement(name), attributes, content);

export const svgElement = (name, attributes = {}, content = []) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, content);

export const whole = (count) => Math.round(count).toLocaleString("en");

export const tableRows = (heads, rows) => {
  const cells = (kind, values) => htmlElement("tr", {}, values.map((value) => htmlElement(kind, {}, value)));
  return [cells("th", heads), ...rows.map((row) => cells("td", row))];
};
