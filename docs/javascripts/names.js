// Names and options in the text are broken after a space, and after a slash or a mark of a URL's parameters:
// not where that begins a word, nor between two slashes; and nowhere else if they fit. In the tables of a phone,
// names are also broken within, so that the last column is seen.
const LONG = 32;
const BREAK = /(?<= |[^ ][/?&](?!\/))/;
const WITHIN = /(?<=[\w"}][-_.=:,({])(?=[\w"])|(?<=[a-z])(?=[A-Z])/;

const pieces = (texts, breakClass, spanClass) =>
  texts.flatMap((text, position) => {
    const span = document.createElement("span");
    span.className = spanClass(text);
    span.textContent = text;
    const wbr = document.createElement("wbr");
    wbr.className = breakClass;
    return position ? [wbr, span] : [span];
  });

for (const code of document.querySelectorAll("article :not(pre) > code")) {
  for (const text of [...code.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE)) {
    const parts = text.data.replace(/\s+/g, " ").split(BREAK);
    const wholes = pieces(parts, "", (part) => (part.length > LONG ? "whole long" : "whole"));
    if (code.closest("td, th")) {
      for (const whole of wholes.filter((each) => each.nodeName === "SPAN")) {
        whole.replaceChildren(...pieces(whole.textContent.split(WITHIN), "narrow", () => "whole"));
      }
    }
    text.replaceWith(...wholes);
  }
}
