// The header and the table of shards.

import { get } from "./api.js";
import { byId, make, makeCells, setCells, setText, showProblem, syncRows } from "./dom.js";
import { bytes, count, duration } from "./format.js";

const PILL_OF_STATE = { serving: "good", starting: "warn", draining: "warn", unreachable: "bad", missing: "bad" };
const COLUMNS = ["", "", "mono", "", "number", "number", "number", "number", "number", "number"];

/** Reads and shows the cluster and its shards; returns whether the API answered. */
export async function refreshCluster() {
  const cluster = await refreshHeader();
  const shards = await refreshShards();
  return cluster && shards;
}

async function refreshHeader() {
  const problem = byId("cluster-problem");
  try {
    const { body } = await get("v1/cluster");
    setText(byId("cluster-name"), body.cluster);
    setText(byId("cluster-id"), body.cluster_id ?? "–");
    setText(byId("cluster-epoch"), count(body.epoch));
    setText(byId("cluster-version"), body.version);
    document.title = `${body.cluster} – shardam`;
    if (body.ready && body.redis_error === null) {
      setHealth("ready", "good");
    } else {
      setHealth(body.ready ? "Redis is away" : "not ready", "warn");
    }
    const waits = [...body.waiting_for, ...(body.redis_error === null ? [] : [body.redis_error])];
    showProblem(problem, waits.length === 0 ? null : { reason: "NOT_READY", detail: waits.join("; ") });
    return true;
  } catch (error) {
    setHealth("no answer", "bad");
    showProblem(problem, error);
    return false;
  }
}

function setHealth(text, kind) {
  const health = byId("health");
  setText(health, text);
  health.className = `pill ${kind}`;
}

async function refreshShards() {
  const section = byId("shards").closest("section");
  try {
    const { body } = await get("v1/shards");
    syncRows(byId("shards").tBodies[0], body.shards, (shard) => String(shard.shard), makeShardRow, updateShardRow);
    showProblem(byId("shards-problem"), null);
    section.classList.remove("stale");
    return true;
  } catch (error) {
    showProblem(byId("shards-problem"), error);
    section.classList.add("stale");
    return false;
  }
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
    count(shard.num_rows),
    bytes(shard.record_bytes),
    bytes(shard.resident_bytes),
    count(shard.num_clients),
    count(shard.queue_depth),
    duration(shard.uptime_s),
  ]);
  const pill = row.cells[1].firstElementChild;
  setText(pill, shard.state);
  pill.className = `pill ${PILL_OF_STATE[shard.state] ?? ""}`;
  row.title = shard.problem ?? (shard.waiting_for ? `waiting for ${shard.waiting_for}` : "");
}
