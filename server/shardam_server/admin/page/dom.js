// Small helpers around the document. Everything from the API enters it as text, never as markup.

/** Returns the element with this id. */
export function byId(id) {
  const element = document.getElementById(id);
  if (element === null) {
    throw new Error(`the page has no element #${id}`);
  }
  return element;
}

/** Sets an element's text, only if it differs, so that a refresh moves neither selection nor screen reader. */
export function setText(element, text) {
  if (element.textContent !== text) {
    element.textContent = text;
  }
}

/** Makes an element with a class and a text. */
export function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) {
    element.className = className;
  }
  element.textContent = text;
  return element;
}

/** Shows a problem in its place, or hides the place. */
export function showProblem(element, problem) {
  element.hidden = problem === null;
  if (problem === null) {
    element.replaceChildren();
    return;
  }
  const text = `${problem.reason} ${problem.detail}`;
  if (element.dataset.shown !== text || element.childElementCount === 0) {
    element.dataset.shown = text;
    element.replaceChildren(make("strong", "", problem.reason), problem.detail);
  }
}

/**
 * Brings the rows of a table body in line with items, reusing rows by key.
 *
 * @param {HTMLTableSectionElement} body
 * @param {any[]} items
 * @param {(item: any) => string} keyOf
 * @param {(item: any) => HTMLTableRowElement} makeRow called once per key
 * @param {(row: HTMLTableRowElement, item: any) => void} updateRow called at each refresh
 */
export function syncRows(body, items, keyOf, makeRow, updateRow) {
  const known = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  items.forEach((item, index) => {
    const key = keyOf(item);
    let row = known.get(key);
    if (row === undefined) {
      row = makeRow(item);
      row.dataset.key = key;
    }
    known.delete(key);
    if (body.rows[index] !== row) {
      body.insertBefore(row, body.rows[index] ?? null);
    }
    updateRow(row, item);
  });
  known.forEach((row) => row.remove());
}

/** Makes a table row of empty cells with these classes. */
export function makeCells(classNames) {
  const row = document.createElement("tr");
  classNames.forEach((className) => row.append(make("td", className)));
  return row;
}

/** Sets the texts of a row's cells; null leaves a cell as it is. */
export function setCells(row, texts) {
  texts.forEach((text, index) => {
    if (text !== null) {
      setText(row.cells[index], text);
    }
  });
}
