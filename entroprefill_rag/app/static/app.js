"use strict";
// Everything that comes from documents or the model goes in as text, never as markup.

const at = (id) => document.getElementById(id);
const percent = (share) => (share === null || share === undefined ? "–" : `${Math.round(100 * share)}%`);
const number = (value) => (value === null || value === undefined ? "–" : value.toFixed(3));
const seconds = (value) => `${value.toFixed(2)} s`;

let status_ = null; // what the server last said of itself
let current = null; // {id, answered} of the last whole answer
let controller = null; // of the answer that is being made

function make(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined && text !== null) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function bar(share, limit) {
  const outer = make("span", null, "bar");
  outer.setAttribute("aria-hidden", "true"); // the number beside it says the same
  const inner = make("i");
  inner.style.width = `${100 * Math.min(Math.max(share || 0, 0), 1)}%`;
  outer.append(inner);
  if (limit !== undefined && limit !== null) {
    const mark = make("b");
    mark.style.left = `calc(${100 * Math.min(limit, 1)}% - 2px)`;
    outer.append(mark);
  }
  return outer;
}

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function call(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: { "X-EntroPrefill": "1", ...(options.headers || {}) } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "the server does not answer; is it still running?");
  }
  if (response.ok) return response;
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error || message;
  } catch { /* no JSON: the number must do */ }
  if (response.status === 401 && path !== "/api/login") {
    at("login").hidden = false;
    at("token").focus();
  }
  throw new Refused(response.status, message);
}

const post = (path, data, signal) =>
  call(path, { method: "POST", body: JSON.stringify(data), headers: { "Content-Type": "application/json" }, signal });

// Model and documents.

async function watch() {
  try {
    show(await (await call("/api/status")).json());
  } catch (error) {
    at("status").textContent = error.message;
    if (error.status === 401) return; // the token starts it again
  }
  if (!status_ || status_.state === "loading") setTimeout(watch, 700);
}

function show(told) {
  status_ = { ...(status_ || {}), ...told };
  const { state, text } = status_;
  if (state === "loading") at("status").textContent = `Loading: ${text}`;
  else if (state === "failed") at("status").textContent = `Loading failed: ${text}`;
  else at("status").textContent = `${status_.model}, pruning ${status_.pruning ? "on" : "off"}`;
  at("go").disabled = state !== "ready" || controller !== null;
  if (told.terms) terms(told.terms);
  if (state === "ready") documents();
}

function terms(all) {
  at("terms").replaceChildren(...Object.values(all).flatMap((one) => [make("dt", one.label), make("dd", one.text)]));
  for (const cell of document.querySelectorAll("[data-term]")) {
    cell.textContent = all[cell.dataset.term].label;
    cell.title = all[cell.dataset.term].text;
  }
}

function documents() {
  const own = status_.uploaded;
  const count = (n, what) => `${n.toLocaleString("en")} ${what}${n === 1 ? "" : "s"}`;
  at("store").textContent = status_.documents
    ? `${count(status_.documents, "document")}${status_.folder ? ` of ${status_.folder}` : ""}, ${count(status_.chunks, "chunk")}, found by ${status_.embedder}.`
    : own.length ? "Only what was uploaded here." : "No documents yet: add one.";
  at("uploading").hidden = !status_.uploads;
  at("uploaded").replaceChildren(...own.map((file) => {
    const item = make("li", `${file.name}: ${count(file.chunks, "chunk")}`);
    for (const note of file.notes) item.append(" ", make("small", note, "quiet"));
    const remove = make("button", "Remove");
    remove.type = "button";
    remove.setAttribute("aria-label", `Remove ${file.name}`);
    remove.addEventListener("click", () => change(() => post("/api/remove", { name: file.name })));
    item.append(remove);
    return item;
  }));
  at("listing").hidden = !status_.listed.length;
  at("listed").replaceChildren(...status_.listed.map((one) => {
    const item = make("li", `${one.path}: ${count(one.chunks, "chunk")}`);
    for (const note of one.notes) item.append(" ", make("small", note, "quiet"));
    return item;
  }));
  if (status_.documents > status_.listed.length) at("listed").append(make("li", `and ${status_.documents - status_.listed.length} more`));
  at("unread").hidden = !status_.skipped.length;
  at("skipped").replaceChildren(...status_.skipped.map((one) => make("li", `${one.path}: ${one.reason}`)));
}

async function change(request) {
  at("upload-error").replaceChildren();
  try {
    show(await (await request()).json());
  } catch (error) {
    at("upload-error").append(make("p", error.message));
  }
}

async function upload() {
  const files = [...at("files").files];
  at("upload-error").replaceChildren();
  at("files").disabled = true;
  let done = 0;
  for (const [place, file] of files.entries()) {
    at("upload-progress").textContent = `Reading ${file.name} (${place + 1} of ${files.length})`;
    try {
      if (status_.uploads && file.size > status_.uploads.file_bytes) {
        throw new Refused(413, `more than ${status_.uploads.file_bytes.toLocaleString("en")} bytes, the most that is taken`);
      }
      const response = await call(`/api/upload?name=${encodeURIComponent(file.name)}`, {
        method: "POST", body: file, headers: { "Content-Type": "application/octet-stream" },
      });
      show(await response.json());
      done += 1;
    } catch (error) {
      at("upload-error").append(make("p", `${file.name}: ${error.message}`));
    }
  }
  at("upload-progress").textContent = done ? `${done} of ${files.length} added` : "";
  at("files").value = "";
  at("files").disabled = false;
}

// Answers.

async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    for (const part of parts) if (part) yield JSON.parse(part);
  }
}

async function answer(path, data, box, times, told) {
  box.textContent = "";
  times.textContent = "";
  box.setAttribute("aria-busy", "true");
  let ended = null;
  try {
    const response = await post(path, data, controller.signal);
    for await (const event of lines(response)) {
      if (event.type === "retrieved") at("progress").textContent = `Reading ${event.chunks} chunks`;
      else if (event.type === "decision") told(event);
      else if (event.type === "text") {
        const below = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
        box.append(event.text);
        if (below) box.scrollTop = box.scrollHeight;
      } else if (event.type === "restarted") {
        box.textContent = "";
        at("progress").textContent = `Answering again in full: ${event.message}`;
      } else if (event.type === "error") throw new Refused(500, event.error);
      else if (event.type === "done") {
        told(event);
        ended = event;
      }
    }
    if (!ended) throw new Refused(0, "the answer broke off");
    if (!box.textContent.trim()) box.textContent = "(the model said nothing)";
    times.textContent = `First token ${seconds(ended.first_token)}, ${seconds(ended.total)} in all for ` +
      `${ended.generated_tokens} tokens; ${ended.kept_tokens.toLocaleString("en")} of ` +
      `${ended.prompt_tokens.toLocaleString("en")} prompt tokens in the upper layers`;
    if (ended.finish === "length") times.textContent += "; cut at the longest answer";
    if (ended.drift) times.append(make("span", `Decoding: attention on dropped chunks ${ended.drift}`, "warning"));
    return ended;
  } finally {
    box.setAttribute("aria-busy", "false");
  }
}

async function guarded(work) {
  controller = new AbortController();
  at("ask-error").textContent = "";
  at("go").disabled = true;
  at("stop").disabled = false;
  try {
    await work();
  } catch (error) {
    const stopped = error.name === "AbortError";
    at("progress").textContent = stopped ? "Stopped" : "";
    if (!stopped) at("ask-error").textContent = error.message;
  } finally {
    controller = null;
    at("stop").disabled = true;
    at("go").disabled = !status_ || status_.state !== "ready";
  }
}

function ask(event) {
  event.preventDefault();
  const question = at("question").value;
  if (at("go").disabled || !question.trim()) return;
  guarded(async () => {
    current = null;
    at("downloads").hidden = true;
    at("comparison").textContent = "";
    at("full").textContent = at("full-times").textContent = "";
    at("full-article").hidden = !at("compare").checked;
    at("progress").textContent = "Looking up chunks";
    const ended = await answer("/api/ask", { question }, at("pruned"), at("pruned-times"), decided);
    current = { id: ended.id, compared: false };
    cite(ended.answer);
    downloads(ended.id);
    at("progress").textContent = "The answer is complete";
    if (at("compare").checked) await compare();
  });
}

async function compare() {
  at("full-article").hidden = false;
  at("progress").textContent = "Answering without pruning";
  const ended = await answer("/api/full", { id: current.id }, at("full"), at("full-times"), () => {});
  current.compared = true;
  at("comparison").textContent = `The answers ${ended.same ? "are the same" : "differ"}. One run each; the first answer of a server warms up.`;
  at("progress").textContent = "Both answers are complete";
}

function toggled() {
  at("full-article").hidden = !at("compare").checked;
  if (at("compare").checked && current && !current.compared && !controller) guarded(compare);
}

function decided(event) {
  at("headline").textContent = event.headline;
  at("reason").textContent = event.outcome === "pruned" ? event.reason.message : `${event.reason.message} (${event.reason.code})`;
  // The end of an answer tells the same again, and what held a chunk; what was opened stays open.
  const told = JSON.stringify(event.sources.map(({ reason, ...rest }) => rest));
  if (at("sources").dataset.told === told) {
    event.sources.forEach((source, place) => {
      at("sources").children[place].querySelector(".why").textContent = why(source);
    });
    return;
  }
  at("sources").dataset.told = told;
  at("sources").replaceChildren(...event.sources.map(card));
  layers(event);
}

function why(source) {
  return source.reason ? ` (${source.reason})` : "";
}

function card(source) {
  const item = make("li", null, `card ${source.status === "not admitted" ? "dropped" : source.status}`);
  if (source.number !== null) item.dataset.number = source.number;
  const name = source.title && source.title !== source.path ? source.title : source.path;
  item.append(make("h3", `${source.number === null ? "" : `[${source.number}] `}${name}`));
  const facts = make("p", null, "quiet");
  facts.append(make("span", source.status, "state"));
  facts.append(make("span", why(source), "why"));
  if (source.tokens !== null) facts.append(`, ${source.tokens} tokens`);
  if (source.share !== null) facts.append(`, attention ${percent(source.share)}`);
  if (source.evidence !== null) facts.append(`, evidence ${percent(source.evidence)}`);
  item.append(facts);
  if (source.share !== null) item.append(bar(source.share));
  const more = make("details");
  more.append(make("summary", name === source.path ? "Text" : `Text, ${source.path}`), make("pre", source.text || "(empty)"));
  item.append(more);
  return item;
}

function cite(text) {
  const named = new Set([...text.matchAll(/\[(\d{1,3})\]/g)].map((found) => found[1]));
  for (const item of at("sources").children) {
    if (!named.has(item.dataset.number)) continue;
    item.classList.add("cited");
    const dropped = item.classList.contains("dropped");
    item.querySelector("p").append(dropped ? ", named in the answer though it was dropped" : ", named in the answer");
  }
}

function layers(event) {
  const rows = event.layers.map((one) => {
    const row = make("tr", null, one.state === "accepted" ? "accepted" : "");
    const head = make("th", `${one.layer} of ${event.layers_of_model}`);
    head.scope = "row";
    head.dataset.label = "layer";
    row.append(head);
    const cell = (label, ...parts) => {
      const made = make("td");
      made.dataset.label = label;
      made.append(...parts);
      row.append(made);
    };
    if (one.state === "not reached") {
      for (const label of ["document mass", "saved", "worst row", "audit"]) cell(label, "–");
      cell("verdict", "not reached");
      return row;
    }
    cell("document mass", number(one.doc_mass), bar(one.doc_mass));
    if (one.saved_tokens === null) cell("saved", "–");
    else cell("saved", `${one.saved_tokens} tokens, ${percent(one.saved_share)}`, bar(one.saved_share));
    if (one.worst_row === null) cell("worst row", "–");
    else cell("worst row", `${number(one.worst_row)}${one.cap === null ? "" : ` / ${one.cap}`}`, bar(one.worst_row, one.cap));
    const audits = one.audits.flatMap((audit) => [
      make("span", `${number(audit.bound)} / ${audit.limit} ${audit.passed ? "pass" : "fail"}${audit.exact ? ", exact" : ""}`, audit.passed ? "pass" : "fail"),
      bar(audit.bound, audit.limit),
    ]);
    cell("audit", ...(audits.length ? audits : ["–"]));
    cell("verdict", make("span", one.state === "accepted" ? "accepted. " : "rejected. ", one.state === "accepted" ? "pass" : "fail"), one.verdict.message);
    return row;
  });
  at("audit").hidden = rows.length === 0;
  at("audit").tBodies[0].replaceChildren(...rows);
  const said = [];
  for (const [kind, text] of Object.entries(event.claims)) {
    const line = make("p");
    line.append(make("b", `${kind[0].toUpperCase()}${kind.slice(1)}. `), text);
    said.push(line);
  }
  for (const text of event.warnings) said.push(make("p", `Note. ${text}`, "warning"));
  if (event.not_claimed.length) {
    const more = make("details");
    const list = make("ul");
    list.append(...event.not_claimed.map((text) => make("li", text)));
    more.append(make("summary", "Not claimed"), list);
    said.push(more);
  }
  at("claims").replaceChildren(...said);
}

function downloads(id) {
  at("record").href = `/api/record/${encodeURIComponent(id)}`;
  at("report").href = `/api/report/${encodeURIComponent(id)}`;
  at("downloads").hidden = false;
}

at("ask").addEventListener("submit", ask);
at("stop").addEventListener("click", () => controller && controller.abort());
at("compare").addEventListener("change", toggled);
at("files").addEventListener("change", upload);
at("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) ask(event);
});
at("login").addEventListener("submit", async (event) => {
  event.preventDefault();
  at("login-error").textContent = "";
  try {
    await post("/api/login", { token: at("token").value });
    at("login").hidden = true;
    at("token").value = "";
    at("question").focus();
    watch();
  } catch (error) {
    at("login-error").textContent = error.message;
  }
});
watch();
