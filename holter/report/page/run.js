/* The page of a run, from its view. `Holter.showRun` builds it, and called again brings it up to date in place. */
(function (Holter) {
  'use strict';

  const { el, named, sentence } = Holter;
  const S = Holter.sections;
  // The norm that was clipped often lies on the norm itself.
  const DASHES = new Map([
    ['clip_norm', 'dash'],
    ['clip_max_norm', 'dot'],
  ]);
  const NORMS = ['gradient_norm', 'clip_norm', 'gradient_norm_clipped', 'clip_max_norm'];
  const VALIDATION = /(^|[/_.-])(val|valid|validation|eval|dev|test)([/_.-]|$)/i;
  const INNER = /^(time|machine|batch)\/|^(step_time|monitor_cost|optimizer_step|(samples|tokens)_per_second|skipped)$/;
  const MOST = 24; // charts of what was also logged
  const EMPTY = {
    run: {},
    verdict: { state: 'unknown', severity: null, sentence: '' },
    findings: [],
    events: [],
    health: [],
    outlook: '',
    signs: [],
    scalars: {},
    maps: [],
    more_maps: [],
    histograms: {},
    flow: [],
    machine: { stages: {}, figures: [] },
    thresholds: [],
    unobserved: [],
    notes: [],
  };

  let page = null;

  // Charts over steps ---------------------------------------------------------------------------------------------

  function picked(view, names) {
    return names
      .filter((name) => Object.hasOwn(view.scalars, name))
      .map((name) => ({ name, dash: DASHES.get(name), ...view.scalars[name] }));
  }

  function curves(view) {
    const names = Object.keys(view.scalars);
    const validation = names.filter((name) => VALIDATION.test(name));
    const losses = validation.filter((name) => /loss/i.test(name)).slice(0, 4);
    const others = validation.filter((name) => !losses.includes(name)).slice(0, 6);
    const rates = names.filter((name) => /^learning_rate(\/|$)/.test(name)).slice(0, 6);
    return [
      {
        key: 'loss',
        title: losses.length ? 'Loss, with validation' : 'Loss',
        height: 260,
        series: picked(view, ['loss', ...losses]),
      },
      ...others.map((name) => ({ key: name, title: sentence(name), height: 180, series: picked(view, [name]) })),
      { key: 'rate', title: 'Learning rate', height: 160, series: picked(view, rates) },
      {
        key: 'norms',
        title: 'Gradient norm, before and after clipping',
        height: 220,
        series: picked(view, NORMS),
        log: 'auto',
      },
    ].filter((chart) => chart.series.length);
  }

  function rest(view) {
    const used = new Set(curves(view).flatMap((chart) => chart.series.map((one) => one.name)));
    const moves = (name) => {
      const [low, high] = Holter.charts.extremes(view.scalars[name].values);
      return low < high;
    };
    return Object.keys(view.scalars)
      .filter((name) => !used.has(name) && !INNER.test(name) && moves(name))
      .map((name) => ({ key: name, title: sentence(name), height: 130, series: picked(view, [name]) }));
  }

  function machineCharts(view) {
    const names = Object.keys(view.scalars);
    const stages = Object.keys(view.machine.stages || {}).map((name) => `time/${name}`);
    const times = [...new Set([...stages, ...names.filter((name) => name.startsWith('time/'))])];
    const memory = names.filter((name) => /^machine\/.*memory/.test(name));
    const [unit, size] = unitOf(picked(view, memory));
    const divided = (by) => (one) => ({
      ...one,
      values: one.values.map((value) => (value === null ? null : value / by)),
      low: null,
    });
    const spent = picked(view, times),
      longest = Math.max(0, ...spent.map((one) => Holter.charts.extremes(one.values)[1]));
    return [
      {
        key: 'time',
        title: `Time of a step, ${longest < 1 ? 'ms' : 's'}`,
        height: 200,
        stacked: true,
        log: false,
        series: spent.map(divided(longest < 1 ? 0.001 : 1)),
      },
      {
        key: 'step_time',
        title: 'Seconds a step',
        height: 150,
        series: times.length ? [] : picked(view, ['step_time']),
      },
      {
        key: 'samples',
        title: 'Samples a second',
        height: 150,
        log: false,
        series: picked(view, ['samples_per_second']),
      },
      { key: 'tokens', title: 'Tokens a second', height: 150, log: false, series: picked(view, ['tokens_per_second']) },
      {
        key: 'memory',
        title: `Memory, ${unit}`,
        height: 170,
        log: false,
        series: picked(view, memory).map(divided(size)),
      },
    ]
      .filter((chart) => chart.series.length)
      .map((chart) => ({ ...chart, format: { rangemode: 'tozero' } }));
  }

  function unitOf(series) {
    const most = Math.max(0, ...series.map((one) => Holter.charts.extremes(one.values)[1]));
    return most >= 2 ** 31 ? ['GiB', 2 ** 30] : ['MiB', 2 ** 20];
  }

  /** A section of charts over steps: the figures are made once, and filled whenever there is more to show. */
  function charted(chartsOf, around = () => [[], []], extra = () => '') {
    return {
      signature: (view) =>
        JSON.stringify([
          chartsOf(view).map((chart) => [chart.key, chart.title, chart.series.map((one) => one.name)]),
          extra(view),
        ]),
      build(view) {
        const [before, after] = around(view);
        const figures = chartsOf(view).map((chart) =>
          S.figure(
            chart.title,
            S.plot(chart.height, chart.key),
            chart.series.map((one) => Holter.words(one.name.replace(/^(time|machine)\//, ''))),
          ),
        );
        return [...before, el('div', { class: 'stack' }, figures), ...after];
      },
      fill(view, node) {
        const plots = [...node.querySelectorAll('.plot')];
        for (const chart of chartsOf(view)) {
          const at = plots.find((plot) => plot.dataset.chart === chart.key);
          const shapes = () => Holter.marks.resumeShapes(view);
          if (at) Holter.charts.lines(at, { ...chart, marks: Holter.marks.sinces(view), shapes });
        }
      },
    };
  }

  function stepsForm() {
    const field = (name) =>
      el('input', {
        type: 'number',
        min: '0',
        inputmode: 'numeric',
        'aria-label': `${name} step`,
        'data-key': `steps ${name}`,
      });
    const [from, to] = [field('first'), field('last')];
    const all = el(
      'button',
      { type: 'button', class: 'button', onclick: () => Holter.charts.setRange(null) },
      'All steps',
    );
    const form = el(
      'form',
      {
        class: 'steps',
        onsubmit: (event) => {
          event.preventDefault();
          Holter.charts.setRange([from.value, to.value]);
        },
      },
      'Steps',
      from,
      'to',
      to,
      el('button', { type: 'submit', class: 'button' }, 'Zoom'),
      all,
    );
    Holter.charts.onRange((range) => {
      [from.value, to.value] = range ? range.map((step) => Math.round(step)) : ['', ''];
    });
    return form;
  }

  // Sections ------------------------------------------------------------------------------------------------------

  /** A section whose words follow from one part of the view. */
  function told(name, build) {
    return { signature: (view) => JSON.stringify(view[name]), build: (view) => (view[name].length ? build(view) : []) };
  }

  function sectionsOf(strip, open) {
    return [
      { id: 'findings', title: 'Findings', ...told('findings', (view) => S.findings(view, open)) },
      { id: 'events', title: 'Order of events', ...told('events', S.events) },
      {
        id: 'layers',
        title: 'Layers over time',
        missing: 'No layers were recorded.',
        signature: (view) => String(view.maps.length + view.more_maps.length > 0),
        build: (view) => (view.maps.length + view.more_maps.length ? [strip.node] : []),
        fill: (view) => strip.update(view),
      },
      {
        id: 'curves',
        title: 'Loss, rate and norms',
        missing: 'No loss, rate or norm was recorded.',
        ...withForm(charted(curves, Holter.marks.resumeWords, Holter.marks.resumes)),
      },
      { id: 'flow', title: 'Gradient flow by depth', ...Holter.flow((id) => id !== 'activation') },
      { id: 'activations', title: 'Activations by depth', ...Holter.flow((id) => id === 'activation') },
      {
        id: 'machine',
        title: 'Machine',
        missing: 'Neither times nor memory were recorded.',
        ...charted(
          machineCharts,
          (view) => [[S.stages(view.machine.stages || {}), S.figures(view.machine.figures || [])].filter(Boolean), []],
          (view) => view.machine,
        ),
      },
      { id: 'health', title: 'Health', ...told('health', S.health) },
      {
        id: 'outlook',
        title: 'Outlook',
        ...told('outlook', (view) => [el('p', {}, Holter.shorten(view.outlook, 600))]),
      },
      { id: 'signs', title: 'Signs', ...told('signs', (view) => S.signs(view, open)) },
      { id: 'others', title: 'Also logged', ...charted((view) => rest(view).slice(0, MOST), othersLeft, leftOut) },
      { id: 'thresholds', title: 'Thresholds', ...told('thresholds', S.thresholds) },
      { id: 'unobserved', title: 'Not observed', ...told('unobserved', (view) => S.bullets(view.unobserved)) },
    ];
  }

  const leftOut = (view) => rest(view).length - MOST;

  function othersLeft(view) {
    const words = `${Holter.whole(leftOut(view))} more`;
    return [[], leftOut(view) > 0 ? [el('p', { class: 'muted' }, `${words} are not drawn.`)] : []];
  }

  /** Where there are curves, the steps can be chosen by number too. */
  function withForm(section) {
    const form = stepsForm();
    return { ...section, build: (view) => (curves(view).length ? [form, ...section.build(view)] : []) };
  }

  function create() {
    const root = document.getElementById('page');
    const panel = Holter.layer.create();
    const strip = Holter.strip.create(
      (layer, opener) => panel.open(layer, opener),
      (id) => made.options.loadMap?.(id),
    );
    const made = {
      panel,
      strip,
      nav: el('nav', { 'aria-label': 'Parts of this page' }, el('ul', {})),
      head: el('div', { class: 'head' }),
      verdict: el('section', { class: 'verdict', 'aria-label': 'Verdict' }),
      notes: el('div', { class: 'notes' }),
      sections: sectionsOf(strip, (layer, opener) => panel.open(layer, opener)),
      known: new Map(),
      options: {},
    };
    const blocks = made.sections.map((section) => {
      const body = el('div', { class: 'body' });
      section.node = el('section', { id: section.id, class: 'block' }, el('h2', {}, section.title), body);
      section.body = body;
      return section.node;
    });
    root.replaceChildren(
      Holter.theme.button(),
      el('div', { class: 'frame' }, made.nav, el('main', {}, made.head, made.notes, made.verdict, blocks)),
      panel.node,
    );
    Holter.charts.onRange((range) => made.options.onZoom?.(range));
    return made;
  }

  /** Builds again what has changed; says whether it did. */
  function renew(key, node, signature, build) {
    if (page.known.get(key) === signature) return;
    page.known.set(key, signature);
    Holter.charts.drop(node);
    node.replaceChildren(...build());
  }

  function bring(section, view) {
    renew(section.id, section.body, section.signature(view), () => section.build(view));
    const isEmpty =
      !section.body.querySelector('*') ||
      (section.body.children.length === 1 && !section.body.textContent.trim() && !section.body.querySelector('.plot'));
    if (isEmpty && section.missing) section.body.replaceChildren(el('p', { class: 'muted' }, section.missing));
    section.node.hidden = isEmpty && !section.missing;
    if (!isEmpty && section.fill) section.fill(view, section.body);
  }

  function navigation(sections) {
    const shown = sections.filter((section) => !section.node.hidden);
    return [
      el(
        'ul',
        {},
        shown.map((section) => el('li', {}, el('a', { href: `#${section.id}` }, section.title))),
      ),
    ];
  }

  function header(run) {
    return [
      el('p', { class: 'brand' }, 'Holter'),
      el(
        'h1',
        {},
        named(run.name || 'Run'),
        ' ',
        el(
          'span',
          { class: `state ${/^[a-z]+$/.test(run.state) ? run.state : ''}` },
          named(run.state || 'unknown', 40),
        ),
      ),
      S.facts(run),
    ];
  }

  function stepsOf(view) {
    let [first, last] = [Infinity, -Infinity];
    for (const one of [...Object.values(view.scalars), ...view.maps]) {
      if (!one.steps.length) continue;
      [first, last] = [Math.min(first, one.steps[0]), Math.max(last, one.steps[one.steps.length - 1])];
    }
    return first <= last ? [first, last] : [0, 1];
  }

  /** Shows a run, or brings what is shown up to date.
   *
   * options.layerDetail(layer): a promise of {series, histograms} with more than the view has of a layer, or of null.
   * options.loadMap(id): a promise of one of `more_maps`, the strip charts that the view only names.
   * options.onZoom(range): told the steps that are looked at, [first, last], or null for all of them. */
  Holter.showRun = function showRun(sent, options = {}) {
    const view = { ...EMPTY, ...sent };
    page = page || create();
    page.options = options;
    const focused = document.activeElement?.dataset?.key;
    Holter.charts.setExtent(...stepsOf(view));
    renew('head', page.head, JSON.stringify(view.run), () => header(view.run));
    renew('notes', page.notes, JSON.stringify([view.notes, view.run.error, view.run.dropped]), () => S.damage(view));
    renew('verdict', page.verdict, JSON.stringify(view.verdict), () => S.verdict(view));
    page.panel.update(view, options.layerDetail);
    page.sections.forEach((section) => bring(section, view));
    renew('nav', page.nav, page.sections.map((section) => section.node.hidden).join(), () => navigation(page.sections));
    if (focused && !document.activeElement?.dataset?.key) {
      [...document.querySelectorAll('[data-key]')]
        .find((node) => node.dataset.key === focused)
        ?.focus({ preventScroll: true });
    }
  };

  const sent = document.getElementById('view');
  if (sent && sent.textContent.trim()) Holter.showRun(JSON.parse(sent.textContent));
})((window.Holter = window.Holter || {}));
