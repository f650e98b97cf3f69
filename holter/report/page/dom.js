/* Elements, words and colours. Names of layers and runs may hold anything: they become text nodes, never markup. */
(function (Holter) {
  'use strict';

  const SVG = 'http://www.w3.org/2000/svg';
  // A circle with a tick, a triangle, an octagon, a circle: shapes that differ without their colours.
  const ICONS = {
    good: ['M8 1a7 7 0 1 0 0 14A7 7 0 0 0 8 1z', 'M4.8 8.3l2.2 2.2 4.3-4.7'],
    warning: ['M8 1.6 15 14H1z', 'M8 6v4M8 11.7v.6'],
    critical: ['M5.1 1h5.8L15 5.1v5.8L10.9 15H5.1L1 10.9V5.1z', 'M5.6 5.6l4.8 4.8M10.4 5.6l-4.8 4.8'],
    unknown: ['M8 1a7 7 0 1 0 0 14A7 7 0 0 0 8 1z', 'M4.8 8h6.4'],
  };

  /** An element with attributes and children; a text becomes a text node, an `onclick` a listener. */
  function el(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
      else node.setAttribute(name, value === true ? '' : String(value));
    }
    node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ''));
    return node;
  }

  function icon(kind) {
    const node = document.createElementNS(SVG, 'svg');
    node.setAttribute('viewBox', '0 0 16 16');
    node.setAttribute('class', `icon ${kind}`);
    node.setAttribute('aria-hidden', 'true');
    ICONS[kind].forEach((path, place) => {
      const line = document.createElementNS(SVG, 'path');
      line.setAttribute('d', path);
      line.setAttribute('class', place ? 'sign' : 'shape');
      node.append(line);
    });
    return node;
  }

  /** The text with everything invisible written out: control, bidirectional and broken characters. */
  function printable(text) {
    return String(text).replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (sign) => {
      const code = sign.codePointAt(0).toString(16);
      return code.length > 2 ? `\\u${code.padStart(4, '0')}` : `\\x${code.padStart(2, '0')}`;
    });
  }

  /** At most so many characters, the middle left out: the ends of a layer's name tell more. */
  function shorten(text, most) {
    const signs = printable(String(text).slice(0, 4096)); // of a monstrous name the rest is not looked at
    if (signs.length <= most) return signs;
    const head = Math.ceil((most - 1) / 3);
    return `${signs.slice(0, head)}…${signs.slice(signs.length - (most - 1 - head))}`;
  }

  /** A name in a page, shortened to what can be read; never nothing, for there would be nothing to click on. */
  function named(text, most = 120) {
    return shorten(text, most) || '(no name)';
  }

  /** For plotly, which reads a little markup in its texts. */
  function plotText(text, most = 60) {
    return named(text, most).replace(/&/g, '&amp;').replace(/</g, '&lt;').replace(/>/g, '&gt;');
  }

  /** Three digits that count. */
  function number(value) {
    if (typeof value !== 'number' || Number.isNaN(value)) return value === null || value === undefined ? '–' : 'nan';
    if (!Number.isFinite(value)) return value > 0 ? 'inf' : '-inf';
    const size = Math.abs(value);
    if (size >= 1000 && size < 1e6) return Math.round(value).toLocaleString('en');
    if (size !== 0 && (size < 1e-4 || size >= 1e6))
      return value
        .toExponential(2)
        .replace(/\.?0+e/, 'e')
        .replace('e+', 'e');
    return String(Number(value.toPrecision(3)));
  }

  function whole(value) {
    return typeof value === 'number' ? Math.round(value).toLocaleString('en') : '–';
  }

  function share(value) {
    if (typeof value !== 'number') return '–';
    if (value > 0 && value < 0.001) return '<0.1 %';
    return `${Number((100 * value).toPrecision(2))} %`;
  }

  function scaled(value, units, step) {
    let power = 0;
    while (Math.abs(value) >= step && power < units.length - 1) [value, power] = [value / step, power + 1];
    return `${power ? Number(value.toPrecision(3)) : Math.round(value)}${units[power]}`;
  }

  const amount = (value) => scaled(value, ['', ' K', ' M', ' B', ' T'], 1000);
  const size = (value) => scaled(value, [' B', ' KiB', ' MiB', ' GiB', ' TiB'], 1024);

  /** In the largest unit of which there are two. */
  function duration(seconds) {
    for (const [unit, length] of [
      ['d', 86400],
      ['h', 3600],
      ['min', 60],
    ]) {
      if (seconds >= 2 * length) return `${Math.round(seconds / length)} ${unit}`;
    }
    if (seconds > 0 && seconds < 0.1) return `${Number((1000 * seconds).toPrecision(2))} ms`;
    return `${Number(seconds.toPrecision(2))} s`;
  }

  /** `dead-relu` or `gradient_norm` as words. After the forward come the loss, the backward and all up to the step. */
  function words(text) {
    return shorten(
      String(text)
        .replace(/[-_]/g, ' ')
        .replace(/\blr\b/g, 'learning rate')
        .replace(/^(time\/)?backward$/, '$1loss and backward'),
      200,
    );
  }

  function sentence(text) {
    const said = words(text);
    return said.charAt(0).toUpperCase() + said.slice(1);
  }

  /** Rows of a matrix that was sent as base64 of little-endian numbers; each row is a view, nothing is copied. */
  const unpacked = new WeakMap();
  function matrix(sent) {
    if (!sent || !sent.bdata) return { rows: 0, columns: 0, row: () => new Float32Array(0) };
    if (!unpacked.has(sent)) unpacked.set(sent, numbersIn(sent));
    const [rows, columns] = String(sent.shape).split(',').map(Number),
      values = unpacked.get(sent);
    return { rows, columns, row: (place) => values.subarray(place * columns, (place + 1) * columns) };
  }

  function numbersIn(sent) {
    const binary = atob(sent.bdata);
    const bytes = new Uint8Array(binary.length);
    for (let place = 0; place < binary.length; place += 1) bytes[place] = binary.charCodeAt(place);
    if (sent.dtype === 'log') return Float32Array.from(new Uint16Array(bytes.buffer), climb(sent));
    const kinds = { f8: Float64Array, f4: Float32Array, u1: Uint8Array };
    return new kinds[sent.dtype](bytes.buffer);
  }

  /** From codes to numbers: some that stand for themselves, then the steps of a ladder, by sign where there are two. */
  function climb({ low, step, signs }) {
    const special = [NaN, 0, Infinity, -Infinity];
    return (code) => {
      if (code < special.length) return special[code];
      const place = Math.floor((code - special.length) / signs);
      return ((code - special.length) % signs ? -1 : 1) * Math.exp(low + step * place);
    };
  }

  // Theme ---------------------------------------------------------------------------------------------------------

  const NAMES = ['ink', 'muted', 'line', 'paper', 'accent', 'critical', 'c1', 'c2', 'c3', 'c4', 'c5', 'c6'];
  const system = window.matchMedia('(prefers-color-scheme: dark)');
  const listeners = [];
  let palette = null;

  /** The colours of the page as charts need them, read off the style sheet. */
  function colors() {
    if (palette) return palette;
    const probe = document.body.appendChild(el('span'));
    palette = {};
    for (const name of NAMES) {
      probe.style.color = `var(--${name})`;
      palette[name] = getComputedStyle(probe).color;
    }
    probe.remove();
    palette.series = [palette.c1, palette.c2, palette.c3, palette.c4, palette.c5, palette.c6];
    return palette;
  }

  function transparent(color, opacity) {
    return color.replace('rgb(', 'rgba(').replace(')', `, ${opacity})`);
  }

  function isDark() {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === 'dark' : system.matches;
  }

  function forget() {
    palette = null;
  }

  function changed() {
    forget();
    listeners.forEach((tell) => tell());
  }

  function choose(theme) {
    document.documentElement.dataset.theme = theme;
    try {
      window.localStorage.setItem('holter-theme', theme);
    } catch {
      // Without storage the choice lasts as long as the page.
    }
    changed();
  }

  function stored() {
    try {
      return window.localStorage.getItem('holter-theme');
    } catch {
      return null;
    }
  }

  function button() {
    const made = el('button', { type: 'button', class: 'button theme', 'data-key': 'theme', onclick: () => choose(isDark() ? 'light' : 'dark') });
    const name = () => {
      made.textContent = isDark() ? 'Light theme' : 'Dark theme';
    };
    name();
    listeners.push(name);
    return made;
  }

  if (['dark', 'light'].includes(stored())) document.documentElement.dataset.theme = stored();
  system.addEventListener('change', changed);
  Holter.theme = { colors, transparent, isDark, forget, button, onChange: (tell) => listeners.push(tell) };

  // Cells of strip charts -------------------------------------------------------------------------------------------

  const VIRIDIS = [
    '#440154',
    '#482878',
    '#3e4989',
    '#31688e',
    '#26828e',
    '#1f9e89',
    '#35b779',
    '#6ece58',
    '#b5de2b',
    '#fde725',
  ];
  const ZERO = '#9aa0a6',
    ODD = '#ff4f8b';
  const INNER = 0.05; // of the colours, at either end, for what is zero and what is not finite
  const CELL_COLORS = [
    [0, ZERO],
    [INNER / 2, ZERO],
    ...VIRIDIS.map((color, place) => [INNER + ((1 - 2 * INNER) * place) / (VIRIDIS.length - 1), color]),
    [1 - INNER / 2, ODD],
    [1, ODD],
  ];

  /** The cells of a map as shares of its colours: 0 where a value is zero, 1 where it is not finite, between them the
   * logarithm. Remembered by the map. */
  const remembered = new WeakMap();
  function cells(map) {
    if (!remembered.has(map)) remembered.set(map, colored(map, matrix(map.values)));
    return remembered.get(map);
  }

  function colored(map, table) {
    const rows = Array.from({ length: table.rows }, (_, row) => table.row(row));
    const scale = map.log ? (value) => Math.log10(Math.abs(value)) : (value) => value;
    const sample = Float32Array.from(
      rows.flatMap((row) => Array.from(row.filter(Number.isFinite), scale)).filter(Number.isFinite),
    ).sort();
    // A few steps of an explosion do not take all the colours.
    const low = sample[Math.floor(0.03 * (sample.length - 1))],
      high = sample[Math.ceil(0.97 * (sample.length - 1))];
    const found = { table, low, high, zeros: false, odd: false, gaps: false };
    const place = (value) => {
      if (Number.isNaN(value)) found.gaps = true;
      else if (!Number.isFinite(value)) found.odd = true;
      else if (map.log && value === 0) found.zeros = true;
      else return INNER + (1 - 2 * INNER) * Math.max(0, Math.min(1, (scale(value) - low) / (high - low || 1)));
      return Number.isNaN(value) ? null : value === 0 ? 0 : 1;
    };
    found.z = rows.map((row) => Array.from(row, place));
    return found;
  }

  /** What the colours of a map mean: the ends of its scale, and those that only what is odd has. */
  function cellLegend(map) {
    const found = cells(map);
    const text = (value) => number(map.log ? 10 ** value : value);
    const swatch = (kind, words) => el('span', { class: 'swatch' }, el('i', { class: kind }), words);
    const [low, high] = [`≤ ${text(found.low)}`, `≥ ${text(found.high)}`];
    return [
      found.low === undefined ? '' : el('span', { class: 'ramp-box' }, low, el('i', { class: 'ramp' }), high),
      found.zeros ? swatch('zero', 'zero') : '',
      found.odd ? swatch('odd', 'not finite') : '',
      found.gaps ? swatch('gap', 'not measured') : '',
      el('span', { class: 'muted' }, map.log ? 'logarithmic' : ''),
    ].filter(Boolean);
  }

  Object.assign(Holter, {
    el,
    icon,
    printable,
    shorten,
    named,
    plotText,
    number,
    whole,
    share,
    amount,
    size,
    duration,
    words,
    sentence,
    matrix,
    cells,
    cellLegend,
    CELL_COLORS,
  });
})((window.Holter = window.Holter || {}));
