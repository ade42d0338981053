"use strict";
{
  const page = JSON.parse(document.getElementById("data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)");
  const config = { responsive: true, displayModeBar: false };

  const small = 640; // pixels; a narrower figure uses its `narrow` layout, if it has one

  function draw(id) {
    const { data, layout: wide, narrow } = page.figures[id];
    const plot = document.getElementById(id);
    const layout = narrow && plot.clientWidth < small ? { ...wide, ...narrow } : wide;
    const template = page.templates[dark.matches ? "dark" : "light"];
    // a finger scrolls the page; a mouse zooms into the figure
    const dragmode = touch.matches ? false : "zoom";
    return Plotly.react(id, data, { ...layout, template, dragmode }, config);
  }

  function drawAll() {
    return Promise.all(Object.keys(page.figures).map(draw));
  }

  // a chip shows or hides its codec in all curves of its section
  document.querySelectorAll(".chips button").forEach((chip) => {
    chip.addEventListener("click", () => {
      const shown = chip.getAttribute("aria-pressed") !== "true";
      chip.setAttribute("aria-pressed", String(shown));
      chip.closest("section").querySelectorAll(".plot").forEach((plot) => {
        const traces = page.figures[plot.id].data.filter((trace) => trace.meta?.codec === chip.dataset.codec);
        traces.forEach((trace) => { trace.visible = shown; });
        if (traces.length) draw(plot.id);
      });
    });
  });

  // after a resize, figures with two layouts may need the other one
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    Object.keys(page.figures).filter((id) => page.figures[id].narrow).forEach(draw);
  });

  dark.addEventListener("change", drawAll);
  drawAll().then(() => { document.documentElement.dataset.drawn = "yes"; });
}
