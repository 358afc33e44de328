// Rows of the chosen table: a page of existing ones, and one row with its optimizer state.

import { get, tablePath } from "./api.js";
import { byId, make, makeCells, setCells, setText, showProblem, syncRows } from "./dom.js";
import { count, short } from "./format.js";
import { Strip } from "./strips.js";

const PAGE_SIZE = 20;
const SHOWN_VALUES = 8;
const COLUMNS = ["", "number", "number", "number", "values"];

/** The section of one table. */
export class RowBrowser {
  /** @param {(id: string) => void} onChoose tells which row was chosen */
  constructor(onChoose) {
    this.onChoose = onChoose;
    this.table = null;
    this.rowId = null;
    this.cursor = "";
    this.nextCursor = null;
    this.strips = new Map();
    byId("lookup").addEventListener("submit", (event) => {
      event.preventDefault();
      this.onChoose(byId("lookup-id").value.trim());
    });
    byId("rows-pager").addEventListener("click", (event) => this.move(event.target.dataset.move));
  }

  /** Shows a table and, if given, one of its rows. */
  async show(table, rowId) {
    if (table !== this.table) {
      this.table = table;
      this.cursor = "";
      this.nextCursor = null;
      byId("rows").tBodies[0].replaceChildren();
    }
    if (rowId !== this.rowId || table === null) {
      this.strips.clear();
      byId("row-strips").replaceChildren();
      byId("row-facts").replaceChildren();
      showProblem(byId("row-problem"), null);
    }
    this.rowId = rowId;
    byId("rows-section").hidden = table === null;
    byId("row").hidden = rowId === null;
    setText(byId("rows-table"), table ?? "");
    setText(byId("row-id"), rowId ?? "");
    byId("lookup-id").value = rowId ?? "";
    await this.refresh();
  }

  /** Reads and shows what is chosen; returns whether the API answered. */
  async refresh() {
    if (this.table === null) {
      return true;
    }
    const row = this.rowId === null ? true : await this.refreshRow();
    return (await this.refreshPage()) && row;
  }

  async refreshPage() {
    const { table, cursor } = this;
    const section = byId("rows-section");
    try {
      const { body } = await get(tablePath(table, `/rows?limit=${PAGE_SIZE}&cursor=${encodeURIComponent(cursor)}`));
      if (table !== this.table || cursor !== this.cursor) {
        return true; // another page was chosen meanwhile, and its own answer follows
      }
      this.nextCursor = body.next_cursor;
      syncRows(byId("rows").tBodies[0], body.rows, (row) => row.id, (row) => this.makeRow(row), updateRow);
      byId("rows-empty").hidden = body.rows.length > 0 || cursor !== "";
      byId("rows-pager").querySelector("[data-move=first]").disabled = cursor === "";
      byId("rows-pager").querySelector("[data-move=next]").disabled = this.nextCursor === null;
      showProblem(byId("rows-problem"), null);
      section.classList.remove("stale");
      return true;
    } catch (error) {
      showProblem(byId("rows-problem"), error);
      section.classList.add("stale");
      return false;
    }
  }

  async refreshRow() {
    const { table, rowId } = this;
    const path = tablePath(table, `/rows/${encodeURIComponent(rowId)}`);
    let answer;
    let problem = null;
    try {
      answer = await get(path);
    } catch (error) {
      problem = error;
    }
    if (table !== this.table || rowId !== this.rowId) {
      return true;
    }
    const absent = problem !== null && problem.reason === "UNKNOWN_ROW";
    byId("row-problem").classList.toggle("mild", absent); // an answer, not a failure
    showProblem(byId("row-problem"), problem);
    if (problem === null) {
      const { body, etag } = answer;
      this.showFacts({
        "owner shard": String(body.shard),
        bucket: String(body.bucket),
        step: count(body.optimizer.step),
        "last touched at step": count(body.last_touched_step),
        "table step": count(body.table_step),
        "change number": body.change_number,
        ETag: etag ?? "–",
      });
      this.showStrips({ weight: body.weight, exp_avg: body.optimizer.exp_avg, exp_avg_sq: body.optimizer.exp_avg_sq });
      return true;
    }
    if (absent) {
      const { shard, bucket, initial_weight: weight } = problem.members;
      this.showFacts({ "owner shard": String(shard), bucket: String(bucket) });
      this.showStrips({ initial_weight: weight });
      return true;
    }
    return problem.reason !== "NO_ANSWER";
  }

  showFacts(facts) {
    const list = byId("row-facts");
    const names = Object.keys(facts);
    const shown = [...list.querySelectorAll("dt")].map((element) => element.textContent);
    if (names.join() !== shown.join()) {
      list.replaceChildren(
        ...names.map((name) => {
          const pair = document.createElement("div");
          pair.append(make("dt", "", name), make("dd", "mono"));
          return pair;
        }),
      );
    }
    list.querySelectorAll("dd").forEach((element, index) => setText(element, facts[names[index]]));
  }

  showStrips(values) {
    const names = Object.keys(values);
    if (names.join() !== [...this.strips.keys()].join()) {
      this.strips = new Map(names.map((name) => [name, new Strip(name)]));
      byId("row-strips").replaceChildren(...[...this.strips.values()].map((strip) => strip.element));
    }
    this.strips.forEach((strip, name) => strip.update(values[name]));
  }

  move(where) {
    if (where === "next" && this.nextCursor !== null) {
      this.cursor = this.nextCursor;
    } else if (where === "first") {
      this.cursor = "";
    } else {
      return;
    }
    void this.refreshPage();
  }

  makeRow(item) {
    const row = makeCells(COLUMNS);
    const button = make("button", "link", item.id);
    button.type = "button";
    button.addEventListener("click", () => this.onChoose(item.id));
    row.cells[0].append(button);
    return row;
  }
}

function updateRow(row, item) {
  const values = item.weight.slice(0, SHOWN_VALUES).map(short).join("  ");
  const more = item.weight.length > SHOWN_VALUES ? "  …" : "";
  setCells(row, [null, String(item.shard), String(item.bucket), count(item.last_touched_step), values + more]);
}
