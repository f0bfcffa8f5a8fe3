// What all pages share: buttons that copy, boxes that keys can scroll, and hints at columns that a narrow window hides.
(function () {
  document.addEventListener("click", ({ target }) => {
    const button = target.closest("[data-copy]");
    if (!button) return;
    const range = document.createRange();
    range.selectNodeContents(document.getElementById(button.dataset.copy));
    const selection = getSelection();
    selection.removeAllRanges();
    selection.addRange(range);
    // Works in pages that are files, too, where a browser may refuse its newer interface.
    button.textContent = document.execCommand("copy") ? "Copied" : "Selected: press Ctrl-C";
  });

  function hintAtHiddenColumns() {
    document.querySelectorAll(".scroll").forEach((box) => {
      const isCut = box.scrollWidth > box.clientWidth + 1;
      let hint = box.previousElementSibling;
      if (hint === null || !hint.classList.contains("hint")) {
        hint = document.createElement("p");
        hint.className = "hint";
        box.before(hint);
      }
      const what = box.querySelector("table") ? "Some columns are" : "A part of the figure is";
      hint.textContent = what + " hidden: scroll sideways →";
      hint.hidden = !isCut;
    });
  }

  // A box that holds more than it shows can get the focus, so that keys scroll it.
  function letKeysScroll() {
    document.querySelectorAll(".scroll, .text, .copyable pre").forEach((box) => {
      if (box.scrollWidth > box.clientWidth + 1 || box.scrollHeight > box.clientHeight + 1) box.tabIndex = 0;
    });
  }

  function look() {
    hintAtHiddenColumns();
    letKeysScroll();
  }

  new ResizeObserver(look).observe(document.querySelector("main"));
  look();
})();
