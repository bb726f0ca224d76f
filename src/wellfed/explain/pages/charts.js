// Draws the charts of a page: zoom by dragging, values under the cursor, one time axis for linked charts.
// The figures of each .plot.alive are JSON in it (chart.py: _payload).
(() => {
  "use strict";
  const LEFT = 45, RIGHT = 36, ABOVE = 8, FEW = 40, STRIP = 5, LOW = 60;
  const live = [];
  let zoomed = null, active = null;
  const css = (name, alpha = "") => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim() + alpha;
  const isOfSteps = chart => /steps?$/.test(chart.u[0]), count = value => Math.round(value).toLocaleString("en");
  const show = value => Math.abs(value) >= 1e4 ? count(value) : String(+value.toPrecision(3));

  const tick = value => Math.abs(value) >= 1e4 ? Intl.NumberFormat("en", {notation: "compact"}).format(value)
    : value && Math.abs(value) < 1e-2 ? (+value.toPrecision(3)).toExponential().replace("e+", "e") : String(+value.toPrecision(4));

  // Curves of a chart as uPlot's series, each with a table of its own x. Areas stand on those before them, and the
  // highest is drawn first, so that each hides what lies below the next.
  const tables = chart => {
    const xs = chart.g, below = [], lines = [], areas = [];
    for (const [name, colour, kind, group, y, low, high] of chart.c) {
      const x = xs[group], own = y;
      let top = y;
      if (kind == "area") {
        const base = below[group];
        top = base ? y.map((one, place) => one == null || base[place] == null ? null : one + base[place]) : y;
        below[group] = top;
      }
      (kind == "area" ? areas : lines).push({name, colour, kind, x, y: top, own, low, high});
    }
    return [...areas.reverse(), ...lines];
  };

  const seriesOf = one => {
    const few = one.y.filter(value => value != null).length < FEW;
    return {
      label: one.name,
      stroke: () => one.kind == "area" ? "transparent" : css(one.colour),
      fill: one.kind == "area" ? () => css(one.colour) : undefined,
      width: one.kind == "line" ? 1.4 : 0,
      ...(one.kind == "told" ? {paths: () => null} : {}),
      points: {show: one.kind == "line" && few, size: 5, width: 1, stroke: () => css(one.colour), fill: () => css(one.colour)},
    };
  };

  // What lies over the curves: levels, and phases as a strip on the axis.
  const decorate = (u, chart) => {
    const c = u.ctx, dpr = devicePixelRatio, {left, top, width, height} = u.bbox;
    const across = value => u.valToPos(value, "x", true), up = value => u.valToPos(value, "y", true);
    c.save();
    c.beginPath(); c.rect(left, top - ABOVE * dpr, width + RIGHT * dpr, height + ABOVE * dpr); c.clip();
    for (const [y, colour, stroke] of chart.l) {
      c.strokeStyle = css(colour);
      c.lineWidth = 1.2 * dpr;
      c.setLineDash(stroke == "dashed" ? [5 * dpr, 4 * dpr] : stroke == "dotted" ? [1.5 * dpr, 3 * dpr] : []);
      if (up(y) < top || up(y) > top + height) continue;
      c.beginPath(); c.moveTo(left, up(y)); c.lineTo(left + width, up(y)); c.stroke();
    }
    c.setLineDash([]);
    c.beginPath(); c.rect(left, top - ABOVE * dpr, width + 14 * dpr, height + ABOVE * dpr); c.clip();
    for (const [begin, end, colour] of chart.s) {
      c.fillStyle = css(colour);
      c.fillRect(across(begin), top + height - STRIP * dpr, Math.max(2 * dpr, across(end) - across(begin)), STRIP * dpr);
    }
    c.restore();
  };

  const zoom = (one, min, max) => {
    const [begin, end] = one.chart.x, together = one.chart.k ? live.filter(other => other.chart.k) : [one];
    const whole = min == null || max - min >= end - begin;
    const range = whole ? null : [Math.max(begin, min), Math.min(end, max)];
    if (one.chart.k) zoomed = range;
    for (const other of together) {
      other.zoomed = range;
      const [low, high] = range || other.chart.x;
      other.u && other.u.setScale("x", {min: low, max: high});
    }
    document.body.classList.toggle("zoomed", live.some(other => other.zoomed));
  };

  const make = one => {
    const {chart, plot} = one, wide = plot.clientWidth;
    if (!wide) return;
    const found = tables(chart), series = [{}], bands = [], told = [], data = [];
    for (const curve of found) {
      const group = [curve.x, curve.y];
      series.push(seriesOf(curve));
      told.push({...curve, at: series.length - 1});
      if (curve.low) {
        for (const edge of [curve.low, curve.high]) {
          series.push({stroke: "transparent", width: 0, points: {show: false}});
          group.push(edge);
        }
        bands.push({series: [series.length - 1, series.length - 2], fill: () => css(curve.colour, "40")});
      }
      data.push(group);
    }
    const [begin, end, unit] = chart.x, [bottom, top] = chart.y, digits = [1, 2, 2.5, 5];
    const incrs = Array.from({length: 60}, (_, place) => unit * digits[place % 4] * 10 ** (Math.floor(place / 4) - 7))
      .filter(incr => !isOfSteps(chart) || Number.isInteger(incr));
    const axis = {
      stroke: () => css("soft"), font: "11px system-ui, sans-serif", grid: {stroke: () => css("line"), width: 1},
      ticks: {show: false},
    };
    one.u = new uPlot({
      width: wide + LEFT + RIGHT, height: chart.h + ABOVE + (chart.a ? 24 : 4), padding: [ABOVE, RIGHT, 0, 0],
      legend: {show: false},
      scales: {
        x: {time: false, range: () => one.zoomed || [begin, end]},
        y: {range: (u, low, high) => !one.zoomed || chart.f || low == null ? [bottom, top]
          : [bottom == 0 ? 0 : low - 0.05 * (high - low || 1), high + 0.05 * (high - low || 1)]},
      },
      axes: [
        {...axis, size: chart.a ? 24 : 4, show: true, space: 60, incrs,
          values: (u, splits) => chart.a ? splits.map(at => at == null ? "" : String(+(at / unit).toPrecision(8))) : [],
          grid: {show: false}},
        {...axis, size: LEFT, space: chart.h < 80 ? 22 : 30, gap: 5,
          values: (u, splits) => splits.map((at, place) => chart.h < LOW && place < splits.length - 1 ? "" : tick(at))},
      ],
      series, bands,
      cursor: {
        drag: {x: true, y: false, setScale: false}, points: {size: 6},
        ...(chart.k ? {sync: {key: "run", scales: ["x", null]}} : {}),
        bind: {dblclick: () => () => { zoom(one, null); return null; }},
      },
      hooks: {
        draw: [u => decorate(u, chart)],
        setSelect: [u => {
          const {left, width} = u.select;
          if (width > 4 && one == active) zoom(one, u.posToVal(left, "x"), u.posToVal(left + width, "x"));
          if (width) u.setSelect({left: 0, width: 0, top: 0, height: 0}, false);
        }],
        setCursor: [u => read(one, told, unit)],
      },
    }, uPlot.join(data), one.root);
    one.u.over.addEventListener("mousedown", () => { active = one; });
    touch(one.u.over);
  };

  // The values at the cursor, in the corner of each chart.
  const read = (one, told, unit) => {
    const {u, chart, values} = one;
    if (!u || u.cursor.idx == null || u.cursor.left < 0) { values.hidden = true; return; }
    values.hidden = false;
    values.replaceChildren();
    const add = (text, colour) => {
      const part = document.createElement("b");
      part.textContent = text;
      if (colour) part.style.color = `var(--${colour})`;
      values.append(part);
    };
    const at = u.data[0][u.cursor.idx] / unit;
    add(`${isOfSteps(chart) ? count(at) : show(at)} ${chart.u[0]}`);
    for (const curve of [...told].reverse()) {
      let at = u.cursor.idx, last = u.data[curve.at];
      while (at > 0 && last[at] === undefined) at--;
      const value = curve.own[curve.x.indexOf(u.data[0][at])];
      if (value != null && curve.name) add(`${curve.name} ${curve.kind == "told" ? count(value) : show(value)}`, curve.kind == "told" ? "" : curve.colour);
    }
    values.classList.toggle("left", u.cursor.left > u.over.clientWidth / 2);
  };

  // A finger across a chart selects, a finger upward scrolls the page.
  const touch = over => {
    const as = {touchstart: "mousedown", touchmove: "mousemove", touchend: "mouseup"};
    for (const [kind, mouse] of Object.entries(as)) over.addEventListener(kind, event => {
      const at = event.changedTouches[0], how = {bubbles: true, clientX: at.clientX, clientY: at.clientY, button: 0, movementX: 1};
      if (kind == "touchstart") over.dispatchEvent(new MouseEvent("mouseenter", how));
      if (kind == "touchstart") over.dispatchEvent(new MouseEvent("mousemove", how));
      over.dispatchEvent(new MouseEvent(mouse, how));
    }, {passive: true});
  };

  const start = (plot, chart) => {
    const root = document.createElement("div"), values = document.createElement("div");
    root.className = "live"; values.className = "values"; values.hidden = true;
    plot.append(root, values);
    const one = {plot, chart, root, values, u: null, zoomed: null};
    live.push(one);
    new ResizeObserver(() => {
      if (!one.u) { make(one); if (one.u) plot.classList.add("on"); }
      else if (plot.clientWidth) one.u.setSize({width: plot.clientWidth + LEFT + RIGHT, height: one.u.height});
    }).observe(plot);
  };

  const tools = () => {
    const first = live.find(one => one.chart.k), bar = document.createElement("p");
    if (!first) return;
    bar.className = "tools";
    bar.append("Drag across a chart to zoom into it; the others follow.");
    const by = factor => () => {
      const [low, high] = zoomed || first.chart.x, half = factor * (high - low) / 2, middle = (low + high) / 2;
      zoom(first, middle - half, middle + half);
    };
    for (const [text, does, label] of [["−", by(2), "zoom out"], ["+", by(0.5), "zoom in"], ["whole run", () => zoom(first, null), "show the whole run"]]) {
      const button = document.createElement("button");
      button.type = "button"; button.textContent = text; button.title = label; button.onclick = does;
      bar.append(button);
    }
    const figure = first.plot.closest("figure");
    (figure.closest(".sides") || figure).before(bar);
  };

  for (const plot of document.querySelectorAll(".plot.alive")) start(plot, JSON.parse(plot.querySelector("script").textContent));
  tools();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => live.forEach(one => one.u && one.u.redraw(false)));
})();
