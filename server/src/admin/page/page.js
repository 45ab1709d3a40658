// Shows the groups and keeps them up to date from the events. Everything that comes from the server is
// set as text, never as HTML.
"use strict";

const MOST_EVENTS = 100;
const CHANGES = ["joined", "left", "expired", "overtaken", "delayed", "updated", "renumbered", "configured", "deleted", "leader", "missed"];

const byId = (id) => document.getElementById(id);

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function row(cellName, texts, className) {
  const made = element("tr", undefined, className);
  for (const text of texts) made.append(element(cellName, text));
  return made;
}

function ranges(numbers) {
  if (!numbers || numbers.length === 0) return "–";
  return numbers.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`)).join(", ");
}

const seconds = (ms) => `${(ms / 1000).toFixed(1)} s`;

function group(shown) {
  const made = element("article");
  made.append(element("h2", shown.name));
  const about = `${shown.numbering}, total ${shown.total}, epoch ${shown.epoch}, ${shown.consistency}`;
  made.append(element("p", shown.degraded ? `${about}, degraded` : about));
  if (shown.problem) made.append(element("p", shown.problem, "problem"));
  const table = element("table");
  const head = element("thead");
  head.append(row("th", ["Client", "State", "Numbers", "Will hold", "Weight", "Address", "Heartbeat", "Releasing for"]));
  const body = element("tbody");
  for (const member of shown.members) {
    const heartbeat = member.heartbeat_age_ms === null ? "–" : `${seconds(member.heartbeat_age_ms)} ago`;
    const cells = [
      member.client_id,
      member.state,
      ranges(member.numbers),
      member.target === null ? "" : ranges(member.target),
      `${member.weight}`,
      member.address ?? "–",
      heartbeat,
      member.pending_since_ms === null ? "" : seconds(member.pending_since_ms),
    ];
    body.append(row("td", cells, member.target === null ? member.state : "moving"));
  }
  table.append(head, body);
  made.append(table);
  return made;
}

async function ask(path) {
  const answer = await fetch(path);
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error?.message ?? `${path} answers ${answer.status}`);
  return body;
}

let asking = false;
let askAgain = false;

// One question at a time, however many events come.
async function refresh() {
  if (asking) {
    askAgain = true;
    return;
  }
  asking = true;
  const status = byId("cluster");
  try {
    const [cluster, list] = await Promise.all([ask("/api/v1/cluster"), ask("/api/v1/groups")]);
    const leader = cluster.leader === null ? "no leader" : `leader ${cluster.leader}`;
    status.textContent = `replica ${cluster.replica_id}, ${leader}, term ${cluster.term}`;
    status.className = "";
    const groups = list.groups.map(group);
    byId("groups").replaceChildren(...(groups.length ? groups : [element("p", "No group yet.")]));
  } catch (error) {
    status.textContent = error.message;
    status.className = "failed";
  }
  asking = false;
  if (askAgain) {
    askAgain = false;
    setTimeout(refresh, 100);
  }
}

function log(event) {
  const { event: name, ...rest } = JSON.parse(event.data);
  const details = Object.entries(rest).map(([key, value]) => `${key}=${value}`).join(" ");
  const events = byId("events");
  events.prepend(element("li", `${new Date().toLocaleTimeString()} ${name} ${details}`));
  while (events.childElementCount > MOST_EVENTS) events.lastElementChild.remove();
  refresh();
}

const source = new EventSource("/api/v1/events");
source.onopen = refresh;
source.onerror = () => {
  byId("cluster").textContent = "no connection to the server; tries again …";
  byId("cluster").className = "failed";
};
for (const name of CHANGES) source.addEventListener(name, log);
// Ages of heartbeats grow without an event.
setInterval(refresh, 5000);
refresh();
