/* The strip chart: layers down, steps across, colour the logarithm of a statistic, findings marked where they began. */
(function (Holter) {
  'use strict';

  const { el, number, named, shorten, cells } = Holter;
  const { BLACK, WHITE } = Holter.marks;
  const MOST_HEIGHT = 760;
  const KEYS = {
    ArrowUp: [-1, 0],
    ArrowDown: [1, 0],
    ArrowLeft: [0, -1],
    ArrowRight: [0, 1],
    PageUp: [-10, 0],
    PageDown: [10, 0],
  };

  /** A strip chart in a page. `open(layer, opener)` is called when a layer is chosen, `load(id)` promises a map that
   * the view only names. */
  function create(open, load) {
    const state = { view: null, id: null, query: '', layer: null, column: null, rows: null, loaded: new Map(), load };
    Object.assign(state, { click: null, doubled: false }); // the click that waits for a second; whether that came
    const parts = build(state, open);
    parts.chart.addEventListener('keydown', (event) => onKey(event, state, parts, open));
    for (const kind of ['pointerdown', 'mousedown']) {
      parts.chart.addEventListener(kind, (event) => pressed(state, event), true);
    }
    // What was dragged over both is undone together.
    Holter.charts.onRange((range) => range || allRows(state, parts, open));
    return {
      node: parts.node,
      update(view) {
        state.view = view;
        const listed = offered(state);
        if (!listed.some((map) => map.id === state.id)) state.id = listed.length ? listed[0].id : null;
        draw(state, parts, open);
        fetchMap(state, parts, open);
      },
    };
  }

  function offered(state) {
    return [...state.view.maps, ...(state.view.more_maps || [])];
  }

  /** Asks for the chosen map where the view only names it; what was asked for before is shown meanwhile. */
  async function fetchMap(state, parts, open) {
    const { id, view } = state;
    if (id === null || view.maps.some((map) => map.id === id)) return;
    const map = await Promise.resolve(state.load(id)).catch(() => null);
    if (map) state.loaded.set(id, map);
    state.refused = map ? null : id;
    if (state.id === id) draw(state, parts, open);
  }

  function build(state, open) {
    const redraw = () => draw(state, parts, open);
    const search = el('input', {
      type: 'search',
      id: 'layer-search',
      placeholder: 'Find a layer',
      'aria-label': 'Find a layer',
      autocomplete: 'off',
      spellcheck: 'false',
      oninput: () => {
        [state.query, state.rows, state.layer] = [search.value, null, null];
        redraw();
      },
      onkeydown: (event) => {
        const found = shown(state);
        if (event.key === 'Enter' && found && found.places.length) open(found.map.layers[found.places[0]], search);
      },
    });
    const plot = el('div', { class: 'plot' });
    const chart = el(
      'div',
      {
        class: 'strip-chart',
        tabindex: '0',
        role: 'group',
        'aria-describedby': 'strip-keys',
        'aria-label': 'Strip chart of the layers',
        'data-key': 'strip',
      },
      plot,
    );
    const parts = {
      search,
      plot,
      chart,
      maps: el('div', { class: 'chips', role: 'group', 'aria-label': 'What is shown' }),
      title: el('b', {}),
      count: el('span', { class: 'muted' }),
      readout: el('output', { class: 'readout', 'aria-live': 'polite' }),
      legend: el('div', { class: 'legend' }),
      tip: el('div', { class: 'tip', hidden: true }),
      list: el('ul', { class: 'layer-list' }),
      empty: el('p', { class: 'muted', hidden: true }),
    };
    chart.append(parts.tip);
    const keys = el(
      'p',
      { class: 'muted small', id: 'strip-keys' },
      'Click a row to open its layer; drag to zoom, double click for all. With the keyboard: arrow keys, then Enter.',
    );
    const list = el('details', { class: 'layers' }, el('summary', {}, 'Layers as a list'), parts.list);
    parts.node = el(
      'div',
      { class: 'strip' },
      parts.maps,
      el('div', { class: 'row' }, parts.title, parts.count, search),
      chart,
      parts.empty,
      parts.legend,
      parts.readout,
      keys,
      list,
    );
    return parts;
  }

  // What is shown -------------------------------------------------------------------------------------------------

  function current(state) {
    return state.view.maps.find((map) => map.id === state.id) || state.loaded.get(state.id);
  }

  /** The map with the places of the layers that fit the search. */
  function shown(state) {
    const map = current(state);
    if (!map) return null;
    const wanted = state.query.trim().toLowerCase();
    const places = map.layers
      .map((_, place) => place)
      .filter((place) => map.layers[place].toLowerCase().includes(wanted));
    return { map, places };
  }

  // Drawing -------------------------------------------------------------------------------------------------------

  function draw(state, parts, open) {
    drawMaps(state, parts, open);
    const now = shown(state);
    parts.chart.hidden = parts.legend.hidden = !now || !now.places.length;
    parts.empty.hidden = !parts.chart.hidden;
    const absent = state.refused === state.id ? 'It could not be fetched.' : 'Fetching it …';
    parts.empty.textContent = now ? 'No layer has this in its name.' : absent;
    parts.search.parentElement.hidden = !now;
    drawList(state, parts, now, open);
    if (!now || !now.places.length) return;
    parts.title.textContent = named(now.map.title);
    const some = now.places.length < now.map.layers.length ? `${now.places.length} of ` : '';
    const read = now.map.thinned ? `, from ${now.map.thinned.map(Holter.whole).join(' of ')} records` : '';
    parts.count.textContent = `${some}${now.map.layers.length} layers${read}`;
    const height = Math.min(MOST_HEIGHT, Math.max(150, now.places.length * 17 + 60));
    parts.plot.style.height = `${height}px`;
    parts.legend.replaceChildren(...Holter.cellLegend(now.map), ...Holter.marks.resumeLegend(state.view));
    Holter.charts.show(parts.plot, (width) => figure(state, now, width, height), {
      linked: true,
      onclick: (event) => clicked(state, () => choose(state, parts, now, event.points[0], open)),
      onhover: (event) => tell(parts, now, event.points[0]),
      onunhover: () => {
        parts.tip.hidden = true;
      },
      onReset: () => {
        window.clearTimeout(state.click);
        state.doubled = true;
        allRows(state, parts, open);
      },
      onRelayout: (change) => {
        if (!('yaxis.range[0]' in change)) return;
        state.rows = [change['yaxis.range[0]'], change['yaxis.range[1]']];
        draw(state, parts, open);
      },
    });
  }

  function figure(state, { map, places }, width, height) {
    const longest = Math.max(...places.map((place) => Math.min(40, map.layers[place].length)));
    const left = Math.max(40, Math.min(width * 0.36, longest * 6.2 + 14));
    const data = [
      {
        type: 'heatmap',
        x: map.steps,
        y: places.map((_, place) => place),
        z: places.map((place) => cells(map).z[place]),
        ygap: height / places.length > 15 ? 1 : Holter.charts.NO_GAP,
        showscale: false,
        hoverinfo: 'none',
        colorscale: Holter.CELL_COLORS,
        zmin: 0,
        zmax: 1,
      },
    ];
    const marks = Holter.marks.findings(state.view, map, places);
    data.push(...Holter.marks.resumeTraces(state.view, places.length), ...marks.data);
    const rows = state.rows || [places.length - 0.5, -0.5];
    return {
      data,
      layout: {
        hovermode: 'closest',
        margin: { l: left, r: 10, t: marks.data.length ? 24 : 8, b: 28 },
        shapes: cursor(state, map, places),
        annotations: marks.annotations,
        yaxis: { ...ticks(map, places, rows, left, height), range: rows, fixedrange: false, showgrid: false },
      },
    };
  }

  /** Labels of as many layers as there is room for. */
  function ticks(map, places, rows, left, height) {
    const from = Math.max(0, Math.ceil(Math.min(...rows))),
      to = Math.min(places.length - 1, Math.floor(Math.max(...rows)));
    const every = Math.max(1, Math.ceil(((to - from + 1) * 13) / (height - 52)));
    const tickvals = [];
    for (let place = from; place <= to; place += every) tickvals.push(place);
    const most = Math.floor((left - 8) / 6.2);
    const end = (name) => `…${name.slice(1 - most).replace(/^[._]/, '')}`; // where room is scarce, it tells the most
    const label = (name) => Holter.plotText(most < 24 && name.length > most ? end(name) : name, most);
    return { tickvals, ticktext: tickvals.map((place) => label(map.layers[places[place]])), ticklen: 0 };
  }

  function cursor(state, map, places) {
    const row = places.findIndex((place) => map.layers[place] === state.layer);
    if (row < 0) return [];
    const box = (color, width) => ({
      type: 'rect',
      xref: 'paper',
      x0: 0,
      x1: 1,
      yref: 'y',
      y0: row - 0.5,
      y1: row + 0.5,
      line: { color, width },
    });
    const step = map.steps[state.column];
    const line =
      step === undefined ? [] : [{ ...Holter.charts.sinceLine(step, WHITE), line: { color: WHITE, width: 1.5 } }];
    return [box(BLACK, 4), box(WHITE, 2), ...line];
  }

  function drawMaps(state, parts, open) {
    const signature = JSON.stringify([state.id, offered(state).map((map) => [map.id, map.title])]);
    if (parts.maps.dataset.signature === signature) return;
    const focused = parts.maps.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    parts.maps.dataset.signature = signature;
    const groups = new Map();
    for (const map of offered(state)) groups.set(map.role, [...(groups.get(map.role) || []), map]);
    const chip = (map) =>
      el(
        'button',
        {
          type: 'button',
          class: 'chip',
          'aria-pressed': String(map.id === state.id),
          'data-key': `map ${map.id}`,
          title: named(map.title),
          'aria-label': named(map.title),
          onclick: () => {
            [state.id, state.rows] = [map.id, null];
            draw(state, parts, open);
            fetchMap(state, parts, open);
          },
        },
        named(Holter.words(map.statistic), 40),
      );
    parts.maps.replaceChildren(
      ...[...groups].map(([role, maps]) =>
        el('span', { class: 'group' }, el('span', { class: 'muted' }, named(Holter.words(role), 40)), maps.map(chip)),
      ),
    );
    for (const one of parts.maps.querySelectorAll('.chip'))
      if (one.dataset.key === focused) one.focus({ preventScroll: true });
  }

  function drawList(state, parts, now, open) {
    const names = now ? now.places.map((place) => now.map.layers[place]) : [];
    const signature = JSON.stringify(names.map((name) => shorten(name, 200)));
    if (parts.list.dataset.signature === signature) return;
    parts.list.dataset.signature = signature;
    parts.list.replaceChildren(
      ...names.map((name) =>
        el(
          'li',
          {},
          el(
            'button',
            {
              type: 'button',
              class: 'link',
              'data-key': `layer ${shorten(name, 200)}`,
              onclick: (event) => open(name, event.currentTarget),
            },
            named(name),
          ),
        ),
      ),
    );
  }

  // Choosing ------------------------------------------------------------------------------------------------------

  function describe({ map, places }, row, column) {
    const place = places[row],
      value = cells(map).table.row(place)[column];
    const said = Number.isNaN(value) ? 'not measured' : Number.isFinite(value) ? number(value) : 'not finite';
    return { layer: map.layers[place], text: `step ${Holter.whole(map.steps[column])}: ${said}` };
  }

  /** Row and column of a point of plotly's, whichever of the traces it lies on. */
  function placeOf(point) {
    return Array.isArray(point.pointNumber) ? point.pointNumber : [Math.round(point.y), -1];
  }

  function tell(parts, now, point) {
    const [row, column] = placeOf(point);
    if (!(row in now.places) || column < 0) return;
    const found = describe(now, row, column);
    parts.tip.replaceChildren(el('b', {}, named(found.layer, 80)), el('span', {}, found.text));
    parts.tip.hidden = false;
    const x = point.xaxis.d2p(now.map.steps[column]) + point.xaxis._offset,
      y = point.yaxis.d2p(row) + point.yaxis._offset;
    const width = parts.chart.clientWidth,
      room = parts.tip.offsetWidth;
    parts.tip.style.left = `${Math.max(0, Math.min(x + 14, width - room - 4))}px`;
    parts.tip.style.top = `${y + 16}px`;
  }

  /** By presses, not by the clock: a page that draws for long comes late to its timers. */
  function pressed(state, event) {
    state.doubled = false;
    if (event.detail > 1) window.clearTimeout(state.click); // the second of two
  }

  /** A click acts at once, but where a second one may follow, to undo a zoom. Plotly tells of both of a double click
   * as clicks too, of the second after the double one. */
  function clicked(state, act) {
    const { range, DOUBLE_CLICK } = Holter.charts;
    if (state.doubled) return;
    window.clearTimeout(state.click);
    if (state.rows || range()) state.click = window.setTimeout(act, DOUBLE_CLICK);
    else act();
  }

  function allRows(state, parts, open) {
    if (!state.rows) return;
    state.rows = null;
    draw(state, parts, open);
  }

  function choose(state, parts, now, point, open) {
    const [row] = placeOf(point);
    if (!(row in now.places)) return;
    state.layer = now.map.layers[now.places[row]];
    draw(state, parts, open);
    open(state.layer, parts.chart);
  }

  function onKey(event, state, parts, open) {
    const now = shown(state);
    if (!now || !now.places.length) return;
    if (event.key === 'Enter' && state.layer !== null) {
      event.preventDefault();
      open(state.layer, parts.chart);
    }
    if (!(event.key in KEYS)) return;
    event.preventDefault();
    const [down, right] = KEYS[event.key];
    const at = now.places.findIndex((place) => now.map.layers[place] === state.layer);
    const row = at < 0 ? 0 : Math.max(0, Math.min(now.places.length - 1, at + down));
    const from = state.column === null ? now.map.steps.length - 1 : state.column;
    const column = Math.max(0, Math.min(now.map.steps.length - 1, from + right));
    [state.layer, state.column] = [now.map.layers[now.places[row]], column];
    draw(state, parts, open);
    const found = describe(now, row, column);
    parts.readout.textContent = `${named(found.layer)}, ${found.text}`;
  }

  Holter.strip = { create };
})((window.Holter = window.Holter || {}));
