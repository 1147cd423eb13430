// What a reader of this page would see that is wrong, and where its links lead.
(async () => {
  await new Promise((next) => requestAnimationFrame(next));
  document.getAnimations().forEach((each) => each.finish());
  const { scrollWidth, clientWidth } = document.documentElement;
  const scrolls = (element) => {
    for (let each = element.parentElement; each; each = each.parentElement) {
      if (["auto", "scroll"].includes(getComputedStyle(each).overflowX)) return true;
    }
    return false;
  };
  const shown = (element) => element.getClientRects().length > 0;
  const outside = (element) => {
    const { left, right } = element.getBoundingClientRect();
    return left < -1 || right > clientWidth + 1;
  };
  const lines = (element) => {
    const range = document.createRange();
    range.selectNodeContents(document.createTreeWalker(element, NodeFilter.SHOW_TEXT).nextNode());
    return range.getClientRects().length;
  };
  const text = (element) => `${element.localName} ${element.textContent.slice(0, 60)}`;
  // Pixels of the smallest text of a picture as it is drawn here.
  const pixels = async (image) => {
    const drawing = await (await fetch(image.src)).text();
    const sizes = [...drawing.matchAll(/font(?:-size)?[:=]\s*["']?([\d.]+)/g)].map((found) => +found[1]);
    const box = drawing.match(/viewBox=["'][\d.]+ [\d.]+ ([\d.]+)/);
    return (Math.min(...sizes) * image.clientWidth) / box[1];
  };
  const images = [...document.querySelectorAll("article img")];
  const sound = images.filter((image) => image.complete && image.naturalWidth > 0);
  return {
    too_wide: scrollWidth > clientWidth ? [`${scrollWidth} pixels`] : [],
    cut_off: [...document.querySelectorAll("article *")]
      .filter((each) => shown(each) && outside(each) && !scrolls(each))
      .map(text),
    // A name or an option on two lines.
    broken_names: [...document.querySelectorAll("article :not(pre) > code")]
      .filter((each) => /^[\w-]{2,32}$/.test(each.textContent) && lines(each) > 1)
      .map(text),
    no_picture: images.filter((image) => !sound.includes(image)).map((image) => image.src),
    small_pictures: (
      await Promise.all(sound.map(async (image) => [image.src, await pixels(image)]))
    )
      .filter(([, size]) => size < %d)
      .map(([source, size]) => `${source}: ${size.toFixed(1)} pixels`),
  };
})()
