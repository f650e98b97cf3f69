/* The list of runs: state, verdict, spark line of the loss. Search by name, model or layer; tick two to compare. */
(function (Holter) {
  'use strict';

  const { el, icon, number, named, shorten, whole } = Holter;
  const { ask, ago, date } = Holter.frame;
  const SVG = 'http://www.w3.org/2000/svg';
  const PAUSE = 1500, MORE = 200, TYPING = 250, MOST = 8;
  const [WIDTH, HEIGHT] = [132, 30];
  const FILTERS = {
    All: () => true,
    Running: (run) => run.state === 'running',
    Sick: (run) => run.verdict?.state === 'sick',
    Healthy: (run) => run.verdict?.state === 'healthy',
    'Ended badly': (run) => ['crashed', 'failed', 'unreadable'].includes(run.state),
  };

  const state = { runs: [], directory: '', tag: null, query: '', filter: 'All', shown: MORE, ticked: new Set(), layers: new Map(), rows: new Map() };

  // A row ---------------------------------------------------------------------------------------------------------

  /** The loss in a few points: where it went, not how much. An outlier does not flatten the rest. */
  function spark(values) {
    const known = values.filter((value) => value !== null).sort((a, b) => a - b);
    if (known.length < 2) return el('span', { class: 'spark' });
    const low = known[0], high = known[Math.floor(0.97 * (known.length - 1))];
    const place = (value, index) => {
      const x = 2 + (index / Math.max(1, values.length - 1)) * (WIDTH - 4);
      const share = high > low ? Math.min(1, (value - low) / (high - low)) : 0.5;
      return `${x.toFixed(1)} ${(HEIGHT - 3 - share * (HEIGHT - 6)).toFixed(1)}`;
    };
    let path = '', isOpen = false;
    values.forEach((value, index) => {
      if (value !== null) path += `${isOpen ? 'L' : 'M'}${place(value, index)}`;
      isOpen = value !== null;
    });
    const node = document.createElementNS(SVG, 'svg'), line = document.createElementNS(SVG, 'path');
    node.setAttribute('viewBox', `0 0 ${WIDTH} ${HEIGHT}`);
    node.setAttribute('class', 'spark');
    node.setAttribute('role', 'img');
    const ends = values.filter((value) => value !== null);
    node.setAttribute('aria-label', `loss from ${number(ends[0])} to ${number(ends[ends.length - 1])}`);
    line.setAttribute('d', path);
    node.append(line);
    return node;
  }

  function verdict(run) {
    if (run.trouble && run.is_lost_mostly) {
      return said('critical', run.state === 'unreadable' ? 'Unreadable' : 'Half lost', run.trouble);
    }
    if (run.trouble && !run.verdict) return said('warning', 'Damaged', run.trouble);
    if (!run.verdict) return said('unknown', 'Not examined yet', '');
    const { state: how, severity, sentence } = run.verdict;
    if (run.trouble && how !== 'sick') {
      const rest = how === 'healthy' ? 'What can be read is healthy.' : sentence;
      return said('warning', 'Partly read', `${run.trouble}. ${rest}`);
    }
    const kind = how === 'healthy' ? 'good' : how === 'sick' ? (severity === 'critical' ? 'critical' : 'warning') : 'unknown';
    const text = how === 'healthy' ? '' : sentence;
    const word = how === 'healthy' ? 'Healthy' : how === 'sick' ? Holter.sentence(severity || 'sick') : 'Not known';
    return said(kind, word, run.trouble ? `${run.trouble}. ${text}` : text);
  }

  function said(kind, word, text) {
    const end = text.indexOf('. ');
    const head = end > 0 ? text.slice(0, end + 1) : text;
    return el('div', { class: 'said' }, el('span', { class: `mark small ${kind}` }, icon(kind), word),
      head ? el('span', { class: 'words', title: shorten(text, 600) }, shorten(head, 160)) : '');
  }

  function row(run, found) {
    const tick = el('input', { type: 'checkbox', 'aria-label': `Compare ${named(run.name)}`, onchange: () => {
      if (tick.checked) state.ticked.add(run.id);
      else state.ticked.delete(run.id);
      drawActions();
    } });
    tick.checked = state.ticked.has(run.id);
    const about = [run.model ? named(run.model, 40) : '', typeof run.parameters === 'number' ? `${Holter.amount(run.parameters)} parameters` : ''];
    const layers = found ? `${found.layers.slice(0, 3).map((name) => named(name, 48)).join(', ')}${found.count > 3 ? ` and ${whole(found.count - 3)} more` : ''}` : '';
    return el('li', { class: `run ${/^[a-z]+$/.test(run.state) ? run.state : ''}` },
      el('label', { class: 'tick' }, tick),
      el('div', { class: 'who' },
        el('a', { class: 'name', href: `/run/${encodeURIComponent(run.id)}` }, named(run.name, 90)),
        el('span', { class: 'muted small' }, about.filter(Boolean).join(', ') || ' '),
        layers ? el('span', { class: 'found small' }, `layers: ${layers}`) : ''),
      el('span', { class: `state ${/^[a-z]+$/.test(run.state) ? run.state : ''}` }, named(run.state, 24)),
      verdict(run),
      el('div', { class: 'loss' }, spark(run.spark), el('span', { class: `figure ${run.is_lost ? 'lost' : ''}` }, run.is_lost ? 'not finite' : run.loss === null ? '' : number(run.loss))),
      el('span', { class: 'steps-done' }, typeof run.steps === 'number' ? `${whole(run.steps)} step${run.steps === 1 ? '' : 's'}` : ''),
      el('time', { class: 'when muted', title: typeof run.created === 'number' ? date(run.created) : '' }, ago(run.created)));
  }

  // The page ------------------------------------------------------------------------------------------------------

  const parts = {
    where: el('p', { class: 'muted small where' }), filters: el('div', { class: 'chips', role: 'group', 'aria-label': 'Which runs' }),
    search: el('input', { type: 'search', id: 'search', placeholder: 'Find a run, model or layer', 'aria-label': 'Find a run, model or layer',
      autocomplete: 'off', spellcheck: 'false' }),
    actions: el('div', { class: 'actions', 'aria-live': 'polite' }), list: el('ul', { class: 'runs' }), empty: el('p', { class: 'muted empty', hidden: true }),
    more: el('button', { type: 'button', class: 'button more', hidden: true, onclick: () => { state.shown += MORE; draw(); } }),
  };

  function build() {
    Holter.frame.bar(el('span', { class: 'brand' }, 'Holter'), Holter.theme.button());
    const heads = ['', 'Run', 'State', 'Verdict', 'Loss', 'Steps', 'Started'];
    document.getElementById('page').replaceChildren(el('main', { class: 'list' }, el('h1', {}, 'Runs'), parts.where,
      el('div', { class: 'tools' }, parts.search, parts.filters),
      el('div', { class: 'heads', 'aria-hidden': 'true' }, heads.map((name) => el('span', {}, name))),
      parts.list, parts.empty, parts.more), parts.actions);
    let timer = null;
    parts.search.addEventListener('input', () => {
      [state.query, state.shown] = [parts.search.value.trim().toLowerCase(), MORE];
      state.layers = new Map();
      draw();
      clearTimeout(timer);
      if (state.query) timer = setTimeout(() => findLayers(state.query).catch(() => {}), TYPING); // told on the page already
    });
  }

  async function findLayers(query) {
    const { json } = await ask(`/api/layers?search=${encodeURIComponent(query.slice(0, 500).toWellFormed())}`);
    if (query !== state.query) return;
    state.layers = new Map(json.runs.map((run) => [run.id, run]));
    draw();
  }

  function fits(run) {
    if (!FILTERS[state.filter](run)) return false;
    if (!state.query || state.layers.has(run.id)) return true;
    const text = [run.name, run.model, run.state, run.verdict?.sentence, run.trouble].join(' ').toLowerCase();
    return state.query.split(/\s+/).every((term) => text.includes(term));
  }

  function draw() {
    const fitting = state.runs.filter(fits);
    const rows = fitting.slice(0, state.shown).map((run) => kept(run, state.layers.get(run.id)));
    const before = [...parts.list.children];
    // What stays where it is keeps the focus.
    if (rows.length !== before.length || rows.some((node, place) => node !== before[place])) parts.list.replaceChildren(...rows);
    parts.more.hidden = fitting.length <= state.shown;
    parts.more.textContent = `Show more: ${whole(fitting.length - state.shown)} are left`;
    parts.empty.hidden = fitting.length > 0;
    parts.empty.textContent = state.runs.length ? 'No run fits.' : 'No runs here yet: holter.watch() records one, and so does `holter demo`.';
    parts.where.textContent = `${whole(state.runs.length)} ${state.runs.length === 1 ? 'run' : 'runs'} in ${shorten(state.directory, 160)}`;
    drawFilters();
    drawActions();
  }

  /** A row is made again only where something in it changed. */
  function kept(run, found) {
    const signature = JSON.stringify([run, found, ago(run.created)]);
    const known = state.rows.get(run.id);
    if (known && known.signature === signature) return known.node;
    const node = row(run, found);
    const focused = known?.node.contains(document.activeElement) ? document.activeElement.tagName : null;
    if (known?.node.isConnected) known.node.replaceWith(node);
    if (focused) node.querySelector(focused === 'A' ? 'a' : 'input').focus({ preventScroll: true });
    state.rows.set(run.id, { signature, node });
    return node;
  }

  function drawFilters() {
    const counts = Object.entries(FILTERS).map(([name, test]) => [name, state.runs.filter(test).length]);
    const signature = JSON.stringify([state.filter, counts]);
    if (parts.filters.dataset.signature === signature) return;
    const focused = parts.filters.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    parts.filters.dataset.signature = signature;
    parts.filters.replaceChildren(...counts.filter(([name, count]) => count || name === 'All' || name === state.filter).map(([name, count]) => el('button', {
      type: 'button', class: 'chip', 'aria-pressed': String(state.filter === name), 'data-key': name,
      onclick: () => { [state.filter, state.shown] = [name, MORE]; draw(); },
    }, `${name} ${whole(count)}`)));
    for (const chip of parts.filters.children) if (chip.dataset.key === focused) chip.focus({ preventScroll: true });
  }

  function drawActions() {
    const ticked = state.runs.filter((run) => state.ticked.has(run.id)); // those that are gone are not compared
    const signature = ticked.map((run) => run.id).join();
    if (parts.actions.dataset.signature === signature) return;
    parts.actions.dataset.signature = signature;
    // The oldest is what the others are compared with.
    const query = ticked.toReversed().map((run) => `run=${encodeURIComponent(run.id)}`).join('&');
    const words = ticked.length > MOST ? `At most ${MOST} runs can be compared` : ticked.length > 1 ? `Compare ${ticked.length} runs` : 'Tick one more to compare';
    const canCompare = ticked.length > 1 && ticked.length <= MOST;
    parts.actions.replaceChildren(...(ticked.length ? [
      canCompare ? el('a', { class: 'button strong', href: `/compare?${query}` }, words) : el('span', {}, words),
      el('button', { type: 'button', class: 'button', onclick: clear }, 'Clear'),
    ] : []));
  }

  function clear() {
    state.ticked.clear();
    state.rows.clear();
    draw();
  }

  async function refresh() {
    const { json, tag } = await ask('/api/runs');
    if (tag !== state.tag) {
      [state.runs, state.directory, state.tag] = [json.runs, json.directory, tag];
      const there = new Set(state.runs.map((run) => run.id));
      for (const id of state.rows.keys()) if (!there.has(id)) state.rows.delete(id);
    }
    Holter.frame.tell(json.trouble);
    draw();
  }

  build();
  Holter.frame.repeat(refresh, PAUSE);
})((window.Holter = window.Holter || {}));
