// The console: reads the admin API every few seconds and shows it in place. What is chosen stands in the page's address.

import { CheckpointList } from "./checkpoints.js";
import { refreshCluster } from "./cluster.js";
import { RowBrowser } from "./rows.js";
import { TableList } from "./tables.js";
import { WorkerList } from "./workers.js";

const REFRESH_MS = 3000;

function readAddress() {
  const parameters = new URLSearchParams(location.hash.slice(1));
  return { table: parameters.get("table"), row: parameters.get("row") };
}

function writeAddress(table, row) {
  const parameters = new URLSearchParams({ table });
  if (row !== null) {
    parameters.set("row", row);
  }
  location.hash = parameters.toString();
}

const tables = new TableList((name) => writeAddress(name, null));
const workers = new WorkerList();
const checkpoints = new CheckpointList();
const rows = new RowBrowser((id) => writeAddress(readAddress().table, id));

async function showChosen() {
  const { table, row } = readAddress();
  tables.choose(table);
  await rows.show(table, row);
}

async function refreshForever() {
  for (;;) {
    if (!document.hidden) {
      await Promise.all([refreshCluster(), workers.refresh(), checkpoints.refresh(), tables.refresh(), rows.refresh()]);
    }
    await new Promise((resolve) => setTimeout(resolve, REFRESH_MS));
  }
}

window.addEventListener("hashchange", () => void showChosen());
void showChosen();
void refreshForever();
