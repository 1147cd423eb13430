// Names and options in the text are broken after a space, and after a slash or a mark of a URL's parameters:
// not where that begins a word, nor between two slashes; and nowhere else if they fit.
const LONG = 32;
const BREAK = /(?<= |[^ ][/?&](?!\/))/;

for (const code of document.querySelectorAll("article :not(pre) > code")) {
  for (const text of [...code.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE)) {
    const parts = text.data.replace(/\s+/g, " ").split(BREAK);
    const pieces = parts.flatMap((part, position) => {
      const whole = document.createElement("span");
      whole.className = part.length > LONG ? "whole long" : "whole";
      whole.textContent = part;
      return position ? [document.createElement("wbr"), whole] : [whole];
    });
    text.replaceWith(...pieces);
  }
}
