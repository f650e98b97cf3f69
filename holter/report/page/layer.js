/* The panel of one layer: its series in every map, its histograms over time. */
(function (Holter) {
  'use strict';

  const { el, named } = Holter;

  /** A panel that stands beside the page until it is closed. `detail(layer)` may know more than the view. */
  function create() {
    const state = { layer: null, opener: null, view: null, detail: null, more: null, onChange: null };
    const title = el('h2', { tabindex: '-1', id: 'layer-title' });
    const body = el('div', { class: 'panel-body' });
    const close = el(
      'button',
      { type: 'button', class: 'button', onclick: () => hide(), 'aria-label': 'Close the layer' },
      'Close',
    );
    const node = el(
      'aside',
      { class: 'panel', role: 'dialog', 'aria-labelledby': 'layer-title', hidden: true },
      el('header', {}, title, close),
      body,
    );
    document.addEventListener('keydown', (event) => {
      if (event.key === 'Escape' && !node.hidden) hide();
    });

    function hide() {
      node.hidden = true;
      state.layer = null;
      Holter.charts.drop(body);
      body.replaceChildren();
      if (state.opener && state.opener.isConnected) state.opener.focus({ preventScroll: true });
    }

    async function open(layer, opener) {
      if (opener && !node.contains(opener)) state.opener = opener;
      Object.assign(state, { layer, more: null });
      Holter.charts.drop(body);
      title.textContent = named(layer);
      node.hidden = false;
      node.scrollTop = 0;
      fill();
      title.focus({ preventScroll: true });
      if (!state.detail) return;
      const more = await state.detail(layer).catch(() => null); // the view alone is worth showing
      if (!more || state.layer !== layer) return;
      state.more = more;
      fill();
    }

    function fill() {
      const found = contents(state.view, state.layer, state.more);
      const signature = JSON.stringify([
        state.layer.slice(0, 4096),
        found.series.map((one) => one.id),
        found.histograms.map((one) => one.role),
      ]);
      if (body.dataset.signature !== signature || !body.children.length) {
        Holter.charts.drop(body);
        body.dataset.signature = signature;
        body.replaceChildren(...skeleton(found, open));
      }
      found.series.forEach((one, place) =>
        Holter.charts.lines(body.querySelectorAll('.plot.series')[place], {
          series: [{ name: one.title, ...one }],
          log: one.log && Holter.charts.isLogAboveZero([one]),
          marks: found.marks,
        }),
      );
      found.histograms.forEach((one, place) =>
        histogram(body.querySelectorAll('.plot.histogram')[place], {
          ...one,
          label: `${one.role} of ${named(state.layer)}`,
        }),
      );
    }

    return {
      node,
      open,
      hide,
      current: () => state.layer,
      update(view, detail) {
        Object.assign(state, { view, detail: detail || null });
        if (state.layer !== null) fill();
      },
    };
  }

  /** What is known of a layer; what was fetched replaces what the view has. */
  function contents(view, layer, more) {
    const series = view.maps.filter((map) => map.layers.includes(layer)).map((map) => seriesOf(map, layer));
    const histograms = Object.entries(view.histograms)
      .filter(([, group]) => Object.hasOwn(group.layers, layer))
      .map(([role, group]) => ({ role, edges: group.edges, scale: group.scale, ...group.layers[layer] }));
    const fetched = Object.entries(more?.histograms || {}).map(([role, group]) => ({ role, ...group }));
    const findings = view.findings
      .map((finding, place) => ({ finding, place }))
      .filter(({ finding }) => finding.layer && isKin(finding.layer, layer));
    return {
      series: replaced(series, more?.series || [], 'id'),
      histograms: replaced(histograms, fetched, 'role'),
      findings,
      marks: findings.map(({ finding }) => finding.since),
      kin: kinOf(view, layer),
    };
  }

  function replaced(known, fetched, key) {
    const names = new Set(fetched.map((one) => one[key]));
    return [...fetched, ...known.filter((one) => !names.has(one[key]))];
  }

  function seriesOf(map, layer) {
    const row = Holter.matrix(map.values).row(map.layers.indexOf(layer));
    const values = Array.from(row, (value) => (Number.isFinite(value) ? value : null));
    return { id: map.id, title: map.title, log: map.log, steps: map.steps, values };
  }

  /** The same layer, its module, or one of its parameters. */
  function isKin(one, other) {
    return one === other || one.startsWith(`${other}.`) || other.startsWith(`${one}.`);
  }

  function kinOf(view, layer) {
    const parent = layer.includes('.') ? layer.slice(0, layer.lastIndexOf('.')) : '';
    const names = new Set(view.maps.flatMap((map) => map.layers));
    return [...names]
      .filter(
        (name) =>
          name !== layer &&
          (name === parent ||
            name.slice(0, name.lastIndexOf('.')) === layer ||
            (parent && name.slice(0, name.lastIndexOf('.')) === parent)),
      )
      .slice(0, 12);
  }

  function skeleton(found, open) {
    const chart = (title, kind, height) => {
      const plot = el('div', { class: `plot ${kind}` });
      plot.style.height = `${height}px`;
      return el('figure', { class: 'chart' }, el('figcaption', {}, named(title, 80)), plot);
    };
    const kin = found.kin.map((name) =>
      el(
        'button',
        { type: 'button', class: 'chip', onclick: (event) => open(name, event.currentTarget) },
        named(name, 60),
      ),
    );
    return [
      ...found.findings.map(({ finding, place }) =>
        el(
          'p',
          { class: `flag ${finding.severity}` },
          Holter.icon(finding.severity === 'critical' ? 'critical' : 'warning'),
          `Finding ${place + 1}: ${Holter.words(finding.title || finding.cause)}`,
          ` since step ${Holter.whole(finding.since)}`,
        ),
      ),
      kin.length ? el('div', { class: 'chips', role: 'group', 'aria-label': 'Next of kin' }, kin) : '',
      found.series.length ? '' : el('p', { class: 'muted' }, 'No series were recorded of this layer.'),
      ...found.series.map((one) => chart(one.title, 'series', 130)),
      ...found.histograms.map((one) => chart(`${Holter.words(one.role)}: distribution over time`, 'histogram', 190)),
      found.histograms.length ? '' : el('p', { class: 'muted' }, 'No histograms were recorded of this layer.'),
    ].filter(Boolean);
  }

  // Histogram over time --------------------------------------------------------------------------------------------

  /** A histogram over time: steps across, the largest values at the top; edges as logarithmic buckets.
   *
   * counts: shares, or 255 times their roots where scale is 'sqrt255'. */
  function histogram(node, { edges, steps, counts, scale = '', label = '' }) {
    const table = Holter.matrix(counts);
    node.setAttribute('role', 'img');
    node.setAttribute('aria-label', `${label}: distribution over ${steps.length} steps`);
    const few = steps.length <= 12; // then each is a column of its own, as wide as the others
    return Holter.charts.show(
      node,
      () => {
        const root = scale === 'sqrt255' ? (value) => value : Math.sqrt; // by their roots tails are seen
        const { middle, outer } = occupied(table, edges);
        const y = [],
          z = [];
        for (let bin = Math.max(0, middle - outer); bin <= Math.min(table.columns - 1, middle + outer); bin += 1) {
          y.push(bin);
          z.push(steps.map((_, column) => root(table.row(column)[bin]) || null));
        }
        const ticks = edgeTicks(edges, middle, outer);
        return {
          data: [
            {
              type: 'heatmap',
              x: few ? steps.map((_, place) => place) : steps,
              y,
              z,
              colorscale: 'Viridis',
              zmin: 0,
              showscale: false,
              hoverinfo: 'skip',
              ygap: Holter.charts.NO_GAP,
            },
          ],
          layout: {
            hovermode: false,
            margin: { l: 64, r: 12, t: 8, b: 26 },
            xaxis: few
              ? { tickvals: steps.map((_, place) => place), ticktext: steps.map((step) => Holter.whole(step)) }
              : {},
            yaxis: {
              tickvals: [middle, ...ticks.map((edge) => edge - 0.5)],
              ticktext: ['0', ...ticks.map((edge) => Holter.number(edges[edge]))],
              showgrid: false,
            },
          },
        };
      },
      { linked: !few },
    );
  }

  /** The bin about zero, and how far from it there are values, on either side. */
  function occupied(table, edges) {
    const middle = Math.max(
      0,
      edges.findIndex((edge, place) => edge <= 0 && edges[place + 1] > 0),
    );
    let outer = 1;
    for (let row = 0; row < table.rows; row += 1) {
      table.row(row).forEach((value, bin) => {
        if (value > 0) outer = Math.max(outer, Math.abs(bin - middle));
      });
    }
    return { middle, outer };
  }

  /** A few edges on either side of zero. */
  function edgeTicks(edges, middle, outer) {
    const every = Math.max(1, Math.ceil(outer / 3));
    const found = [];
    for (let away = every; away <= outer; away += every) found.push(middle - away, middle + 1 + away);
    return found.filter((edge) => edges[edge] !== undefined);
  }

  Holter.layer = { create };
})((window.Holter = window.Holter || {}));
