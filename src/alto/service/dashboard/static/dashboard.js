"use strict";
// Pages ask every other second what is new; the server answers with rendered parts and with figures. A request that
// fails is sent again, so that a page goes on where a restarted server does.
(function () {
  const LIVE_MS = 1500, QUIET_MS = 10000, AGAIN_MS = 2000, TYPING_MS = 500;
  const byId = (id) => document.getElementById(id);
  const { live, task, next } = document.body.dataset;

  function toLogin() {
    location.assign("/login?next=" + encodeURIComponent(location.pathname + location.search));
  }

  // The answer's JSON; an error has the message and the key that the server names.
  async function ask(address, { body, form, headers, signal } = {}) {
    const isPost = body !== undefined || form !== undefined;
    const answer = await fetch(address, {
      method: isPost ? "POST" : "GET", signal,
      headers: { ...headers, ...(body !== undefined ? { "Content-Type": "application/json" } : {}) },
      body: form || (body !== undefined ? JSON.stringify(body) : undefined),
    });
    if (answer.status === 401) toLogin();
    const found = await answer.json().catch(() => ({}));
    if (!answer.ok) {
      const { message, param } = found.error || {};
      throw Object.assign(new Error(message || "The server answered with status " + answer.status + "."), { param });
    }
    return found;
  }

  function tell(message, isFault) {
    const box = byId("answer");
    if (!box) return;
    box.textContent = message;
    box.classList.toggle("failure", Boolean(isFault));
    box.hidden = !message;
  }

  // ---- Parts that change -------------------------------------------------------------------------------------------

  const shown = {};
  let version = "", timer = 0, isAsking = false, isAskedAgain = false, lastSaid = document.body.dataset.said;

  // A table keeps the order that its reader chose.
  function sortingOf(part) {
    const heading = part.querySelector("th[aria-sort=ascending], th[aria-sort=descending]");
    return heading && { text: heading.textContent, direction: heading.getAttribute("aria-sort") };
  }

  function sortAgain(part, chosen) {
    const heading = chosen && Array.from(part.querySelectorAll("th[aria-sort]")).find((each) => each.textContent === chosen.text);
    for (let turn = 0; heading && turn < 2 && heading.getAttribute("aria-sort") !== chosen.direction; turn += 1) window.altoFigures.sortBy(heading);
  }

  function showFragments(fragments) {
    Object.entries(fragments).forEach(([name, html]) => {
      const part = document.querySelector('[data-fragment="' + name + '"]');
      if (!part || shown[name] === html) return;
      shown[name] = html;
      const focused = part.contains(document.activeElement) ? document.activeElement.dataset.keep : undefined;
      const sorting = sortingOf(part);
      const list = part.querySelector(".events");
      const scrolled = list ? list.scrollTop : 0;
      part.innerHTML = html; // rendered by the server, which escapes every text
      sortAgain(part, sorting);
      if (scrolled) part.querySelector(".events").scrollTop = scrolled;
      if (focused) {
        const again = Array.from(part.querySelectorAll("[data-keep]")).find((each) => each.dataset.keep === focused);
        if (again) again.focus({ preventScroll: true });
      }
    });
    showAsked();
  }

  // The axis of progress opens as in a report, unless its reader has chosen one.
  let mayChooseScale = true;
  document.addEventListener("click", ({ target }) => { if (target.closest("[data-scale]")) mayChooseScale = false; });

  function showFigures({ figures, gantt, opens_logarithmic: isLogarithmic }) {
    const has = (id) => {
      const figure = id === "gantt" ? gantt : (figures || {})[id];
      return Boolean(figure) && figure.view !== null;
    };
    document.querySelectorAll("[data-has]").forEach((part) => { part.hidden = !has(part.dataset.has); });
    document.querySelectorAll("[data-lacks]").forEach((part) => {
      part.hidden = has(part.dataset.lacks);
      part.textContent = part.dataset.otherwise; // no longer that it loads
    });
    if (figures && window.altoFigures) window.altoFigures.show(figures);
    if (isLogarithmic && mayChooseScale) document.querySelector('[data-scale="log"]').click();
    if (gantt && window.altoGantt) window.altoGantt.show(gantt);
  }

  async function refresh() {
    if (isAsking) {
      isAskedAgain = true;
      return;
    }
    isAsking = true;
    clearTimeout(timer);
    let wait = AGAIN_MS;
    try {
      const answer = await fetch(live + (live.includes("?") ? "&" : "?") + "seen=" + version);
      if (answer.status === 401) return toLogin();
      if (!answer.ok) throw new Error("status " + answer.status);
      if (answer.status !== 204) {
        const found = await answer.json();
        version = answer.headers.get("X-Version");
        document.body.dataset.isLive = String(found.is_live);
        showFragments(found.fragments);
        showFigures(found);
        if (lastSaid && found.said !== lastSaid) byId("said").textContent = found.said;
        lastSaid = found.said;
      }
      byId("connection").hidden = true;
      wait = document.body.dataset.isLive === "false" || document.hidden ? QUIET_MS : LIVE_MS;
    } catch (error) {
      byId("connection").textContent = "The server does not answer; trying again. This page may be out of date.";
      byId("connection").hidden = false;
    } finally {
      isAsking = false;
    }
    timer = setTimeout(refresh, isAskedAgain ? 0 : wait);
    isAskedAgain = false;
  }

  if (live) {
    document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
    refresh();
  }

  // ---- Commands ----------------------------------------------------------------------------------------------------

  // What was asked of jobs, until their outcome is another one.
  const asked = new Map();

  function showAsked() {
    document.querySelectorAll("[data-job]").forEach((cell) => {
      const found = asked.get(cell.dataset.job);
      if (found && found.outcome !== cell.dataset.outcome) asked.delete(cell.dataset.job);
      cell.querySelector(".asked").textContent = asked.has(cell.dataset.job) ? found.text : "";
    });
  }

  function confirmed(text) {
    const dialog = byId("confirm");
    byId("confirm-text").textContent = text;
    dialog.returnValue = "no";
    dialog.showModal();
    return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
  }

  async function changeTask(button) {
    if (button.dataset.confirm && !(await confirmed(button.dataset.confirm))) return;
    button.disabled = true;
    try {
      const found = await ask(button.dataset.post, { body: {} });
      tell("The task is " + found.status.replaceAll("_", " ") + ".");
    } catch (error) {
      tell(error.message, true);
    } finally {
      button.disabled = false;
    }
    refresh();
  }

  const PAST = { stop: "stop", resume: "resumption", clone: "clone" };

  async function command(cell, action, body) {
    const { job, outcome, address } = cell.dataset;
    asked.set(job, { text: PAST[action] + " requested", outcome });
    showAsked();
    tell("Requested: " + action + " " + job + ". The executor answers at its next step.");
    try {
      const found = await ask(address + "/" + action, { body: body || {} });
      if (found.done) asked.delete(job);
      tell(found.done ? found.message : job + ": " + found.message);
    } catch (error) {
      asked.delete(job);
      tell(error.message, true);
    }
    showAsked();
    refresh();
  }

  // ---- Clones ------------------------------------------------------------------------------------------------------

  const textOf = (value) => (value === null || value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value));

  function valueOf(text) {
    try {
      return text === "" ? null : JSON.parse(text);
    } catch (error) {
      return text;
    }
  }

  function labelled(key, text) {
    const field = document.createElement("div");
    const label = Object.assign(document.createElement("label"), { htmlFor: "clone-" + key, textContent: key });
    const input = Object.assign(document.createElement("input"), { id: "clone-" + key, type: "text", value: text, autocomplete: "off", spellcheck: false });
    Object.assign(input.dataset, { key: key, before: text });
    field.className = "field";
    field.append(label, input);
    return field;
  }

  async function openClone(cell) {
    const { job } = cell.dataset;
    const dialog = byId("clone");
    try {
      const { jobs } = await ask("/api/tasks/" + task);
      const { config } = jobs.find(({ id }) => id === job);
      // What differs between jobs comes first.
      const varies = (key) => new Set(jobs.map((other) => JSON.stringify(other.config[key]))).size > 1;
      const keys = Object.keys(config).sort((a, b) => varies(b) - varies(a));
      byId("clone-settings").replaceChildren(...keys.map((key) => labelled(key, textOf(config[key]))));
    } catch (error) {
      tell(error.message, true);
      return;
    }
    byId("clone-title").textContent = "Clone " + job;
    byId("clone-fault").textContent = "";
    dialog.querySelector("[name=warm]").checked = false;
    dialog.querySelector("form").onsubmit = () => {
      const changed = Array.from(dialog.querySelectorAll("[data-key]")).filter((input) => input.value.trim() !== input.dataset.before);
      const changes = Object.fromEntries(changed.map((input) => [input.dataset.key, valueOf(input.value.trim())]));
      command(cell, "clone", { changes, warm: dialog.querySelector("[name=warm]").checked });
    };
    dialog.showModal();
  }

  document.addEventListener("click", ({ target }) => {
    const button = target.closest("button");
    if (!button) return;
    const cell = button.closest("[data-job]");
    if (button.dataset.post) changeTask(button);
    else if (cell && button.dataset.command) command(cell, button.dataset.command);
    else if (cell && "clone" in button.dataset) openClone(cell);
    else if ("close" in button.dataset) button.closest("dialog").close();
  });

  // ---- New task ----------------------------------------------------------------------------------------------------

  const form = byId("new-task");
  const SETTINGS = ["learning_rate", "n_epochs", "batch_size", "r", "beta"];

  function textsOf() {
    // A hidden field belongs to another method.
    const read = (name) => (form.elements[name].closest(".field").hidden ? "" : form.elements[name].value.trim());
    const hyperparameters = Object.fromEntries(SETTINGS.map((name) => [name, read(name)]));
    const own = ["model", "training_file", "validation_file", "method", "grader", "seed", "suffix", "extra"].map((name) => [name, read(name)]);
    return { ...Object.fromEntries(own), hyperparameters };
  }

  function fieldOf({ param, message }) {
    const named = form.querySelector('[data-field="' + CSS.escape(param || "") + '"]');
    if (named) return named;
    // Faults of settings name the setting first, by its name in ALTO.
    const name = (/^(?:In [a-z_]*\.)?'?([A-Za-z_0-9]+)/.exec(message) || [])[1];
    const setting = Array.from(form.querySelectorAll("[data-field]")).find((field) => [field.dataset.field, ...(field.dataset.names || "").split(" ")].includes(name));
    return setting || (param ? form.querySelector('[data-field="extra"]') : null);
  }

  function clearFaults() {
    form.querySelectorAll(".fault").forEach((fault) => { fault.textContent = ""; });
    form.querySelectorAll("[aria-invalid]").forEach((input) => input.removeAttribute("aria-invalid"));
  }

  function showFault(error) {
    const field = fieldOf(error);
    (field ? field.querySelector(".fault") : byId("form-fault")).textContent = error.message;
    const input = field && field.querySelector("input:not([type=file]), select, textarea");
    if (input) input.setAttribute("aria-invalid", "true");
    return input;
  }

  function element(kind, text, className) {
    const found = document.createElement(kind);
    found.textContent = text;
    if (className) found.className = className;
    return found;
  }

  const duration = (seconds) => (seconds < 90 ? Math.round(seconds) + " s" : seconds < 5400 ? Math.round(seconds / 60) + " min" : (seconds / 3600).toFixed(1) + " h");

  function example({ num_tokens: tokens, segments, chosen, rejected }, index) {
    const box = element("article", "", "sample");
    box.append(element("h3", "Row " + (index + 1) + ", " + tokens + " tokens"));
    [["", segments], ["chosen", chosen], ["rejected", rejected]].forEach(([name, parts]) => {
      if (!parts || !parts.length) return;
      if (name) box.append(element("h4", name));
      const text = element("div", "", "text prompt");
      text.append(...parts.map((part) => element(part.is_trained ? "mark" : "span", part.text)));
      box.append(text);
    });
    return box;
  }

  function showPreview(found) {
    const { num_jobs: jobs, varying, estimate, rows } = found;
    const price = Number(form.dataset.price || NaN);
    byId("preview-jobs").textContent = jobs + (found.is_open_ended ? " or more" : "");
    byId("preview-varying").textContent = varying.length ? "varying " + varying.join(", ") : "one value of each setting";
    byId("preview-time").textContent = estimate ? duration(estimate.duration_s) : "unknown";
    byId("preview-hours").textContent = estimate
      ? estimate.device_hours.toPrecision(3) + " device hours" + (price >= 0 ? ", cost " + (estimate.device_hours * price).toFixed(2) : "")
      : "No such task was measured here yet.";
    const { train_rows: trained, validation_rows: validated, ...others } = rows ? rows.counts : {};
    byId("preview-rows").textContent = trained === undefined ? "–" : trained;
    const lengths = rows && rows.row_tokens.length ? [Math.min(...rows.row_tokens) + " to " + Math.max(...rows.row_tokens) + " tokens each"] : [];
    const changed = Object.entries(others).filter(([name, count]) => count && !name.endsWith("_tokens")).map(([name, count]) => count + " " + name.replaceAll("_", " "));
    byId("preview-tokens").textContent = ["to train, " + (validated || 0) + " to validate", ...lengths, ...changed].join("; ");
    byId("preview-notes").replaceChildren(...[...found.notes, ...(rows ? rows.notes : [])].map((note) => element("p", note, "note")));
    const columns = varying.length ? varying : ["learning_rate", "r", "per_device_train_batch_size", "num_train_epochs"];
    const head = document.createElement("thead"), body = document.createElement("tbody");
    head.append(document.createElement("tr"));
    head.rows[0].append(...columns.map((name) => Object.assign(element("th", name), { scope: "col" })));
    body.append(...found.jobs.map((job) => {
      const line = document.createElement("tr");
      line.append(...columns.map((name) => element("td", textOf(job[name]))));
      return line;
    }));
    byId("preview-table").replaceChildren(head, body);
    byId("preview-examples").replaceChildren(...(rows ? rows.examples : []).map(example));
    byId("preview").hidden = false;
  }

  let typing = 0, drafting = null;

  async function draft() {
    const texts = textsOf();
    clearFaults();
    if (drafting) drafting.abort();
    if (!texts.training_file) return;
    drafting = new AbortController();
    const { signal } = drafting;
    byId("preview-state").textContent = "Preparing the preview …";
    try {
      const body = await ask("/dashboard/request", { body: texts, signal });
      showPreview(await ask("/api/drafts", { body, signal }));
      byId("preview-state").textContent = "With the present values of the form:";
    } catch (error) {
      if (signal.aborted) return;
      byId("preview").hidden = true;
      byId("preview-state").textContent = "The form needs a correction first.";
      showFault(error);
    }
  }

  function draftSoon() {
    clearTimeout(typing);
    typing = setTimeout(draft, TYPING_MS);
  }

  async function upload(input) {
    const name = input.dataset.upload, file = input.files[0];
    if (!file) return;
    const progress = byId(name + "-progress"), fault = byId(name + "-fault");
    fault.textContent = "";
    progress.textContent = "Uploading " + file.name + " …";
    const content = new FormData();
    content.append("purpose", "fine-tune");
    content.append("file", file);
    try {
      const found = await ask("/v1/files", { form: content });
      if (found.status !== "processed") throw new Error(found.status_details || "The file cannot be used.");
      document.querySelectorAll("#training_file, #validation_file").forEach((select) => select.add(new Option(found.filename, found.id), 1));
      byId(name).value = found.id;
      progress.textContent = "Uploaded " + found.filename + ".";
      draft();
    } catch (error) {
      progress.textContent = "";
      fault.textContent = error.message;
    } finally {
      input.value = "";
    }
  }

  if (form) {
    const newKey = () => Array.from(crypto.getRandomValues(new Uint32Array(4)), (part) => part.toString(16)).join("");
    let key = newKey();
    const showFields = () => {
      const { value: method } = form.elements.method;
      byId("beta").closest(".field").hidden = method !== "dpo";
      byId("grader").closest(".field").hidden = method !== "reinforcement";
    };
    showFields();
    form.addEventListener("input", ({ target }) => {
      key = newKey();
      showFields();
      if (target.dataset.upload) upload(target);
      else draftSoon();
    });
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      clearTimeout(typing);
      clearFaults();
      const button = form.querySelector("[type=submit]"), texts = textsOf();
      if (!texts.training_file) {
        showFault({ param: "training_file", message: "Choose a file of training rows, or upload one." }).focus();
        return;
      }
      button.disabled = true;
      try {
        const body = await ask("/dashboard/request", { body: texts });
        // Where an answer is lost, the same key sends the same task once.
        const { id } = await ask("/v1/fine_tuning/jobs", { body, headers: { "Idempotency-Key": key } });
        location.assign("/tasks/" + id);
      } catch (error) {
        const input = showFault(error);
        if (input) input.focus();
        button.disabled = false;
      }
    });
    draft();
  }

  // A link from another site comes without the key, which the browser sends once a page of this one asks.
  if (next) {
    fetch("/dashboard/tasks").then(({ ok }) => { if (ok) location.replace(next); }, () => {});
  }
})();
