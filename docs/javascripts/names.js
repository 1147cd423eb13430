// Names and options in the text are broken after a slash, a space or a mark of a URL's parameters, and
// nowhere else if they fit.
const LONG = 32;

for (const code of document.querySelectorAll("article :not(pre) > code")) {
  for (const text of [...code.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE)) {
    const parts = text.data.replace(/\s+/g, " ").split(/(?<=[/ ?&])/);
    const pieces = parts.flatMap((part, position) => {
      const whole = document.createElement("span");
      whole.className = part.length > LONG ? "whole long" : "whole";
      whole.textContent = part;
      return position ? [document.createElement("wbr"), whole] : [whole];
    });
    text.replaceWith(...pieces);
  }
}
