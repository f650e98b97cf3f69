/* Charts on plotly: drawn when they come near the screen, in the colours of the theme, zoomed on steps together. */
(function (Holter) {
  'use strict';

  const DOUBLE_CLICK = 300; // milliseconds within which a second click makes a double one
  const CONFIG = {
    displayModeBar: false,
    responsive: false,
    doubleClick: false,
    doubleClickDelay: DOUBLE_CLICK,
    displaylogo: false,
  };
  const { colors, transparent } = Holter.theme;
  const TOUCH = window.matchMedia('(pointer: coarse)').matches;
  const PRINT_WIDTH = 680;
  // With no gap at all plotly draws an image that needs a style attribute, which the policy of the page refuses.
  const NO_GAP = 1e-6;

  const drawn = new Map(); // node -> {spec, stale, near, linked}
  const listeners = [];
  let range = null; // the steps that are looked at; null: all
  let extent = [0, 1];
  let printing = false;

  // Drawing -------------------------------------------------------------------------------------------------------

  const observer = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        const chart = drawn.get(entry.target);
        if (!chart) continue;
        chart.near = entry.isIntersecting;
        if (chart.near) draw(entry.target);
      }
    },
    { rootMargin: '400px 0px' },
  );

  /** Shows a chart in a node: `spec()` gives {data, layout} whenever it is drawn. Called again, it is updated. */
  function show(node, spec, options = {}) {
    const known = drawn.get(node);
    drawn.set(node, { spec, stale: true, near: known ? known.near : false, events: known?.events, ...options });
    if (!known) observer.observe(node);
    else if (known.near) draw(node);
    return node;
  }

  /** Forgets the charts below a node that goes away. */
  function drop(parent) {
    for (const node of drawn.keys()) {
      if (!parent.contains(node)) continue;
      observer.unobserve(node);
      drawn.delete(node);
      if (window.Plotly) window.Plotly.purge(node);
    }
  }

  function draw(node) {
    const chart = drawn.get(node);
    if (!window.Plotly || !chart || !chart.stale || !node.isConnected) return;
    chart.stale = false;
    const { data, layout } = chart.spec(widthOf(node));
    window.Plotly.react(node, data, base(node, layout, chart), CONFIG);
    node.querySelectorAll('svg.main-svg').forEach((svg) => svg.setAttribute('aria-hidden', 'true'));
    if (!chart.events) listen(node, chart);
  }

  function listen(node, chart) {
    chart.events = true;
    node.on('plotly_relayout', (change) => {
      const current = drawn.get(node);
      if (!current) return;
      if (current.onRelayout) current.onRelayout(change);
      if (current.linked && 'xaxis.range[0]' in change) setRange([change['xaxis.range[0]'], change['xaxis.range[1]']]);
    });
    // Plotly takes two clicks in quick succession for a double one, however far apart they are. The browser counts
    // those at one place alone; a touch it does not count.
    let isFirst = false;
    node.addEventListener('mousedown', (event) => (isFirst = event.detail === 1), true);
    node.addEventListener('touchstart', () => (isFirst = false), { capture: true, passive: true });
    node.on('plotly_doubleclick', () => {
      if (isFirst) return;
      const current = drawn.get(node);
      if (current?.onReset) current.onReset();
      if (current?.linked) setRange(null);
    });
    for (const name of ['click', 'hover', 'unhover']) {
      node.on(`plotly_${name}`, (event) => drawn.get(node)?.[`on${name}`]?.(event));
    }
  }

  function widthOf(node) {
    return printing ? Math.min(PRINT_WIDTH, node.clientWidth || PRINT_WIDTH) : node.clientWidth || 300;
  }

  function base(node, layout, chart) {
    const theme = colors();
    const axis = {
      gridcolor: theme.line,
      linecolor: theme.line,
      zeroline: false,
      tickcolor: theme.line,
      automargin: false,
      tickfont: { color: theme.muted, size: 11 },
      fixedrange: true,
    };
    const spike = { showspikes: !layout.hovermode, spikecolor: theme.muted, spikethickness: 1, spikedash: 'dot' };
    const x = { ...axis, ...spike, showgrid: false, ...layout.xaxis };
    // A copy: plotly writes into the range that it is given.
    const steps = [...(range || extent)];
    if (chart.linked) Object.assign(x, { range: steps, fixedrange: false, tickformat: ',d', nticks: 6 });
    const height = parseFloat(node.style.height) || 180;
    return {
      margin: { l: 52, r: 12, t: 8, b: 26 },
      dragmode: TOUCH ? false : 'zoom',
      hovermode: 'x unified',
      ...layout,
      showlegend: false,
      autosize: false,
      width: widthOf(node),
      height,
      paper_bgcolor: 'rgba(0,0,0,0)',
      plot_bgcolor: theme.paper,
      font: {
        family: 'system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif',
        size: 12,
        color: theme.ink,
      },
      hoverlabel: {
        bgcolor: theme.paper,
        bordercolor: theme.line,
        font: { color: theme.ink, size: 12 },
        align: 'left',
      },
      xaxis: x,
      yaxis: { ...axis, nticks: 5, ...layout.yaxis },
    };
  }

  /** Draws again what is near the screen; the rest when it comes near. */
  function refresh(everything = false) {
    for (const [node, chart] of drawn) {
      chart.stale = true;
      if (everything || chart.near) draw(node);
    }
  }

  // Steps ---------------------------------------------------------------------------------------------------------

  function setRange(wanted) {
    const next = wanted && wanted.map(Number).every(Number.isFinite) ? wanted.map(Number).sort((a, b) => a - b) : null;
    const all = next && next[0] <= extent[0] && next[1] >= extent[1];
    const chosen = !next || all || next[0] === next[1] ? null : next;
    if (String(chosen) === String(range)) return;
    range = chosen;
    for (const [node, chart] of drawn) {
      if (!chart.linked) continue;
      chart.stale = true;
      if (chart.near) draw(node);
    }
    listeners.forEach((tell) => tell(range));
  }

  /** The first and the last step of the run: all charts over steps have the same ends. */
  function setExtent(first, last) {
    const room = Math.max(0.5, (last - first) * 0.005);
    extent = [first - room, last + room];
  }

  // Kinds of charts -----------------------------------------------------------------------------------------------

  /** A dashed line where something began. */
  function sinceLine(step, color) {
    return {
      type: 'line',
      xref: 'x',
      yref: 'paper',
      x0: step,
      x1: step,
      y0: 0,
      y1: 1,
      line: { color, width: 1.5, dash: 'dash' },
    };
  }

  function isLog(series) {
    const [low, high] = extremes(series.flatMap((one) => one.values.filter((value) => value !== null)));
    return low > 0 && high / low > 30;
  }

  /** The same, of what can be no less than zero: what became zero does not hide how the rest went. */
  function isLogAboveZero(series) {
    const known = series.flatMap((one) => one.values.filter((value) => value !== null && value !== 0));
    return isLog([{ values: known }]);
  }

  function extremes(values) {
    let low = Infinity,
      high = -Infinity;
    for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
    return [low, high];
  }

  /** The axis of the values; a logarithmic one with 1, 2, 5 or whole powers of ten, as many as can be read. */
  function vertical(log, lists) {
    if (!log) {
      const [low, high] = extremes(lists.flat().filter((value) => value !== null));
      return { type: 'linear', exponentformat: 'SI', ...(low === high ? { range: constant(low) } : {}) };
    }
    const [low, high] = extremes(lists.flat().filter((value) => value > 0));
    if (!(low <= high)) return { type: 'log' };
    const [from, to] = [Math.log10(low), Math.log10(high)],
      room = Math.max(0.05, (to - from) * 0.06);
    const every = Math.max(1, Math.ceil((to - from) / 5)),
      digits = to - from > 2.2 ? [1] : to - from > 1 ? [1, 3] : [1, 2, 3, 5, 7];
    const tickvals = [];
    for (let power = Math.floor(from); power <= Math.ceil(to); power += 1) {
      if (power % every === 0) tickvals.push(...digits.map((digit) => digit * 10 ** power));
    }
    return {
      type: 'log',
      range: [from - room, to + room],
      tickvals,
      ticktext: tickvals.map((value) => Holter.number(value)),
    };
  }

  /** Zero has no logarithm: on such an axis it lies below all else, at a place that is labelled so. */
  function grounded(series) {
    const [low, high] = extremes(series.flatMap(everyValue).filter((value) => value > 0));
    const ground = low / Math.max(2, (high / low) ** 0.15);
    const lift = (list) => list && list.map((value) => (value === 0 ? ground : value));
    const lifted = series.map((one) => ({
      ...one,
      values: lift(one.values),
      low: lift(one.low),
      high: lift(one.high),
      texts: one.values.map((value) => Holter.number(value)),
    }));
    const axis = vertical(true, lifted.map(everyValue));
    const tickvals = [ground, ...axis.tickvals.filter((value) => value >= low)];
    const ticktext = tickvals.map((value) => (value === ground ? '0' : Holter.number(value)));
    return { series: lifted, axis: { ...axis, tickvals, ticktext } };
  }

  /** The series as they are drawn, with the axis of their values. */
  function placed(series, log) {
    const values = series.flatMap(everyValue);
    if (log && values.includes(0) && values.some((value) => value > 0)) return grounded(series);
    return { series, axis: vertical(log, [values]) };
  }

  function everyValue(one) {
    return [...one.values, ...(one.low || []), ...(one.high || [])];
  }

  /** The range about a value that never changes: from zero on, a little room beyond. */
  function constant(value) {
    if (value === 0) return [-0.05, 1];
    return value > 0 ? [0, 1.4 * value] : [1.4 * value, 0];
  }

  /** A band between the extremes of what a point stands for, only where there is one. */
  function band(one, color) {
    if (!one.low || one.low.every((value, place) => value === one.high[place])) return [];
    const known = one.steps
      .map((_, place) => place)
      .filter((place) => one.low[place] !== null && one.high[place] !== null);
    const edge = {
      x: known.map((place) => one.steps[place]),
      mode: 'lines',
      line: { width: 0 },
      hoverinfo: 'skip',
      type: 'scatter',
    };
    return [
      { ...edge, y: known.map((place) => one.low[place]) },
      { ...edge, y: known.map((place) => one.high[place]), fill: 'tonexty', fillcolor: transparent(color, 0.18) },
    ];
  }

  function lineTraces(series, stacked) {
    const theme = colors();
    return series.flatMap((one, place) => {
      const color = one.color || theme.series[place % theme.series.length];
      const few = one.values.filter((value) => value !== null).length < 40;
      const trace = {
        type: 'scatter',
        x: one.steps,
        y: one.values,
        mode: few && !stacked ? 'lines+markers' : 'lines',
        name: Holter.plotText(Holter.words(one.name), 32),
        line: { color, width: stacked ? 0.5 : 1.6, dash: one.dash || 'solid' },
        marker: { size: 4, color },
        connectgaps: true,
        ...(one.texts ? { text: one.texts, hovertemplate: '%{text}' } : { hovertemplate: '%{y:.4~g}' }),
      };
      if (stacked) return [{ ...trace, stackgroup: 'all', fillcolor: transparent(color, 0.65) }];
      return [...band(one, color), trace];
    });
  }

  /** Lines over steps. series: [{name, steps, values, low?, high?, color?, dash?}]; marks: steps with a dashed line;
   * shapes(): further ones; span: the steps of a chart that is not linked with the others. */
  function lines(node, { series, marks = [], linked = true, span = null, label = '', ...more }) {
    const { log = 'auto', stacked = false, format = null, shapes = () => [] } = more;
    const drawable = placed(series, log === 'auto' ? isLog(series) : log);
    node.setAttribute('role', 'img');
    node.setAttribute('aria-label', label || series.map(summary).join('; '));
    return show(
      node,
      () => ({
        data: lineTraces(drawable.series, stacked),
        layout: {
          xaxis: {
            hoverformat: ',d',
            unifiedhovertitle: { text: 'step %{x}' },
            ...(linked ? {} : { tickformat: ',d', nticks: 4 }),
            ...(span ? { range: span } : {}),
          },
          yaxis: { ...drawable.axis, ...format },
          shapes: [...shapes(), ...marks.map((step) => sinceLine(step, colors().critical))],
        },
      }),
      { linked },
    );
  }

  function summary(one) {
    const known = one.values.map((value, place) => [one.steps[place], value]).filter(([, value]) => value !== null);
    if (!known.length) return `${Holter.named(one.name, 60)}: nothing`;
    const [first, last] = [known[0], known[known.length - 1]];
    const told = ([step, value]) => `${Holter.number(value)} at step ${step}`;
    return `${Holter.named(one.name, 60)}: ${told(first)}, ${told(last)}`;
  }

  // Life of the page ----------------------------------------------------------------------------------------------

  function print(isPrinting) {
    if (printing === isPrinting) return;
    if (isPrinting) wake();
    printing = isPrinting;
    Holter.theme.forget();
    refresh(isPrinting);
  }

  /** In a file, plotly is kept as text until the page has been painted: it takes longer than all the rest. */
  function wake() {
    const kept = document.getElementById('plotly');
    if (kept) {
      kept.remove();
      const script = document.createElement('script');
      script.textContent = kept.textContent;
      document.head.append(script);
    }
    if (!window.Plotly) return;
    delete document.head.appendChild;
    refresh();
  }

  // The bundle brings the style sheet of plotly's maps. The policy of the page refuses it, and no chart here needs it.
  document.head.appendChild = (node) =>
    node.nodeName === 'STYLE' && node.textContent ? node : Node.prototype.appendChild.call(document.head, node);
  Holter.theme.onChange(() => refresh());
  window.matchMedia('print').addEventListener('change', (event) => print(event.matches));
  window.addEventListener('beforeprint', () => print(true));
  window.addEventListener('afterprint', () => print(false));
  window.addEventListener('load', () => window.requestAnimationFrame(() => window.setTimeout(wake)));
  let width = window.innerWidth;
  window.addEventListener('resize', () => {
    if (printing || width === window.innerWidth) return;
    width = window.innerWidth;
    window.requestAnimationFrame(() => refresh());
  });

  Holter.charts = {
    show,
    drop,
    lines,
    vertical,
    sinceLine,
    colors,
    setRange,
    setExtent,
    extremes,
    isLogAboveZero,
    isDark: Holter.theme.isDark,
    DOUBLE_CLICK,
    NO_GAP,
    range: () => range,
    onRange: (tell) => listeners.push(tell),
  };
})((window.Holter = window.Holter || {}));
