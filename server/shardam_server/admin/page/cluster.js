// The header and the table of shards.

import { get } from "./api.js";
import { byId, make, makeCells, setCells, setText, showProblem, syncRows } from "./dom.js";
import { bytes, count, duration } from "./format.js";

const PILL_OF_STATE = {
  serving: "good",
  starting: "warn",
  draining: "warn",
  suspended: "warn",
  lost: "bad",
  refused: "bad",
  unreachable: "bad",
  missing: "bad",
};
const PILL_OF_JOURNAL = { degraded: "warn", full: "bad", failed: "bad" };
const COLUMNS = ["", "", "mono", "", "", "number", "number", "number", "number", "number", "number"];

/** Reads and shows the cluster and its shards; returns whether the API answered. */
export async function refreshCluster() {
  const [cluster, shards] = await Promise.allSettled([get("v1/cluster"), get("v1/shards")]);
  const known = shards.status === "fulfilled" ? shards.value.body.shards : [];
  if (cluster.status === "fulfilled") {
    showHeader(cluster.value.body, known);
  } else {
    setHealth("no answer", "bad");
    showProblem(byId("cluster-problem"), cluster.reason);
  }
  showShards(shards);
  return cluster.status === "fulfilled" && shards.status === "fulfilled";
}

function showHeader(cluster, shards) {
  setText(byId("cluster-name"), cluster.cluster);
  setText(byId("cluster-id"), cluster.cluster_id ?? "–");
  setText(byId("cluster-epoch"), count(cluster.epoch));
  setText(byId("cluster-version"), cluster.version);
  document.title = `${cluster.cluster} – shardam`;
  if (cluster.redis_error !== null) {
    setHealth(cluster.ready ? "Redis is away" : "not ready", "warn");
  } else {
    setHealth(cluster.ready ? "ready" : "not ready", cluster.ready ? "good" : "warn");
  }
  showProblem(byId("cluster-problem"), clusterProblem(cluster, shards));
}

/** What keeps the cluster from being ready; what stands beside the shards is only counted here. */
function clusterProblem(cluster, shards) {
  const besideShards = new Set(shards.map((shard) => shard.problem));
  const waits = cluster.waiting_for.filter((text) => !besideShards.has(text));
  const down = shards.filter((shard) => shard.problem !== null).length;
  if (waits.length < cluster.waiting_for.length) {
    waits.unshift(`${down} of ${shards.length} shards ${down === 1 ? "does" : "do"} not serve, see below`);
  }
  if (cluster.redis_error !== null) {
    waits.push(cluster.redis_error);
  }
  return waits.length === 0 ? null : { reason: "NOT_READY", detail: waits.join("; ") };
}

function setHealth(text, kind) {
  const health = byId("health");
  setText(health, text);
  health.className = `pill ${kind}`;
}

function showShards(answer) {
  const section = byId("shards").closest("section");
  const problem = byId("shards-problem");
  section.classList.toggle("stale", answer.status === "rejected");
  if (answer.status === "rejected") {
    showProblem(problem, answer.reason);
    return;
  }
  const { shards } = answer.value.body;
  syncRows(byId("shards").tBodies[0], shards, (shard) => String(shard.shard), makeShardRow, updateShardRow);
  showProblem(problem, shardsProblem(shards));
  showProblem(byId("shards-warning"), shardsWarning(shards));
}

/** The gravest reason first: rows that are lost do not come back by waiting. */
function shardsProblem(shards) {
  const down = shards.filter((shard) => shard.problem !== null);
  if (down.length === 0) {
    return null;
  }
  const gravest = down.find((shard) => shard.state === "lost") ?? down[0];
  const texts = new Set([gravest, ...down].map((shard) => shard.problem)); // a wrong token is refused by all alike
  return { reason: gravest.reason, detail: [...texts].join("; ") };
}

function shardsWarning(shards) {
  const warned = shards.filter((shard) => shard.warning !== null);
  if (warned.length === 0) {
    return null;
  }
  const degraded = warned.some((shard) => shard.journal_state === "degraded");
  return { reason: degraded ? "DEGRADED" : "WARNING", detail: warned.map((shard) => shard.warning).join("; ") };
}

function makeShardRow() {
  const row = makeCells(COLUMNS);
  row.cells[1].append(make("span", "pill"));
  return row;
}

function updateShardRow(row, shard) {
  const home = shard.shard === 0 ? " (home)" : "";
  setCells(row, [
    `${shard.shard}${home}`,
    null,
    shard.address ?? "–",
    shard.device ?? "–",
    shard.journal_mode ?? "–",
    count(shard.num_rows),
    bytes(shard.record_bytes),
    bytes(shard.resident_bytes),
    count(shard.num_clients),
    count(shard.queue_depth),
    duration(shard.uptime_s),
  ]);
  const state = row.cells[1].firstElementChild;
  setText(state, shard.state);
  state.className = `pill ${PILL_OF_STATE[shard.state] ?? ""}`;
  updateJournalPill(row.cells[1], shard.journal_state);
  row.title = shard.problem ?? shard.warning ?? "";
  row.cells[4].title = journalTitle(shard);
}

/** Adds or removes the second pill, which only a journal in trouble has. */
function updateJournalPill(cell, state) {
  const kind = PILL_OF_JOURNAL[state];
  const shown = cell.children[1] ?? null;
  if (kind === undefined) {
    shown?.remove();
    return;
  }
  const pill = shown ?? cell.appendChild(make("span"));
  setText(pill, state === "degraded" ? state : `journal ${state}`);
  pill.className = `pill ${kind}`;
}

function journalTitle(shard) {
  if (shard.journal_mode === null || shard.journal_mode === undefined) {
    return "";
  }
  const where = shard.data_folder === null ? "memory only" : `in ${shard.data_folder}`;
  return `${bytes(shard.journal_bytes)} since its base, ${where}`;
}
