/* A push as a plain C loop does it, over the same bytes: what the native kernels are held against (kernels.py compiles it).
 *
 * Rows are weight, exp_avg and exp_avg_sq one behind the other, and an id is its row's place: no index, no table of ids, no
 * check of the gradient, no count of what was touched, one dtype.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define EMPTY (-1)

/* Sums the gradients of each id in order, then updates each row once. table has num_entries (a power of two) entries, distinct
 * and sums have room for count rows. Returns how many ids are distinct. */
int64_t plain_update(float *rows, const int64_t *row_ids, const float *gradients, int64_t count, int64_t dim, int32_t *table,
                     int64_t num_entries, int64_t *distinct, float *sums, float s, float c1, float c2, float eps) {
  const uint64_t mask = (uint64_t)num_entries - 1;
  int64_t num_distinct = 0;
  for (int64_t i = 0; i < num_entries; ++i) table[i] = EMPTY;
  for (int64_t i = 0; i < count; ++i) {
    const float *from = gradients + i * dim;
    uint64_t at = (((uint64_t)row_ids[i] * 0x9e3779b97f4a7c15ull) >> 32) & mask;
    while (table[at] != EMPTY && distinct[table[at]] != row_ids[i]) at = (at + 1) & mask;
    if (table[at] == EMPTY) {
      table[at] = (int32_t)num_distinct;
      distinct[num_distinct] = row_ids[i];
      memcpy(sums + num_distinct * dim, from, (size_t)dim * sizeof(float));
      ++num_distinct;
      continue;
    }
    float *sum = sums + table[at] * dim;
    for (int64_t j = 0; j < dim; ++j) sum[j] += from[j];
  }
  for (int64_t u = 0; u < num_distinct; ++u) {
    float *w = rows + distinct[u] * 3 * dim, *m = w + dim, *v = m + dim;
    const float *g = sums + u * dim;
    for (int64_t j = 0; j < dim; ++j) {
      m[j] += (g[j] - m[j]) * c1;
      v[j] += (g[j] * g[j] - v[j]) * c2;
      w[j] -= s * (m[j] / (sqrtf(v[j]) + eps));
    }
  }
  return num_distinct;
}
