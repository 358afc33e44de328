/* A table with fused Adam as one would write it in plain C: what the peers of service.py do with the rows that they receive.

A row is weight, exp_avg and exp_avg_sq, one after the other, as in a record. Duplicates are found by a hash table and summed in
the order in which they come; each distinct row is then read and written once. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define AHEAD 8 /* rows that are asked for before they are needed */

typedef struct {
    float *rows;
    int64_t num_rows, dim;
    /* scratch of one update, kept between updates */
    int64_t capacity, num_places;
    int32_t *places;
    int64_t *ids;
    float *sums;
} table;

static void *large_pages(size_t size) {
    const size_t page = (size_t)1 << 21;
    void *memory = aligned_alloc(page, (size + page - 1) / page * page);
    if (memory != NULL) madvise(memory, size, MADV_HUGEPAGE);
    return memory;
}

table *plain_new(int64_t num_rows, int64_t dim, float value) {
    table *self = calloc(1, sizeof *self);
    self->num_rows = num_rows;
    self->dim = dim;
    self->rows = large_pages((size_t)(num_rows * 3 * dim) * sizeof(float));
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t i = 0; i < 3 * dim; i++) self->rows[row * 3 * dim + i] = i < dim ? value : 0.0f;
    return self;
}

void plain_gather(const table *self, const int64_t *ids, int64_t count, float *out) {
    const int64_t dim = self->dim;
    for (int64_t k = 0; k < count; k++) {
        if (k + AHEAD < count) {
            const char *next = (const char *)(self->rows + ids[k + AHEAD] * 3 * dim);
            for (int64_t byte = 0; byte < dim * 4; byte += 64) __builtin_prefetch(next + byte);
        }
        memcpy(out + k * dim, self->rows + ids[k] * 3 * dim, (size_t)dim * sizeof(float));
    }
}

static void make_room(table *self, int64_t count) {
    if (count <= self->capacity) return;
    self->capacity = count;
    self->num_places = 1;
    while (self->num_places < 2 * count) self->num_places *= 2;
    free(self->places);
    free(self->ids);
    free(self->sums);
    self->places = malloc((size_t)self->num_places * sizeof *self->places);
    self->ids = malloc((size_t)count * sizeof *self->ids);
    self->sums = large_pages((size_t)(count * self->dim) * sizeof(float));
}

static int64_t sum_duplicates(table *self, const int64_t *ids, const float *gradients, int64_t count) {
    const int64_t dim = self->dim, mask = self->num_places - 1;
    int64_t distinct = 0;
    memset(self->places, 0xff, (size_t)self->num_places * sizeof *self->places);
    for (int64_t k = 0; k < count; k++) {
        int64_t place = (int64_t)(((uint64_t)ids[k] * 0x9E3779B97F4A7C15u) >> 20) & mask;
        while (self->places[place] >= 0 && self->ids[self->places[place]] != ids[k]) place = (place + 1) & mask;
        const float *gradient = gradients + k * dim;
        if (self->places[place] < 0) {
            self->places[place] = (int32_t)distinct;
            self->ids[distinct] = ids[k];
            memcpy(self->sums + distinct * dim, gradient, (size_t)dim * sizeof(float));
            distinct++;
        } else {
            float *sum = self->sums + self->places[place] * dim;
            for (int64_t i = 0; i < dim; i++) sum[i] += gradient[i];
        }
    }
    return distinct;
}

/* One step of torch.optim.SparseAdam; step_size is lr * sqrt(1 - beta2^t) / (1 - beta1^t). Returns the distinct ids. */
int64_t plain_update(table *self, const int64_t *ids, const float *gradients, int64_t count, float beta1, float beta2, float eps,
                     float step_size) {
    make_room(self, count);
    const int64_t dim = self->dim, distinct = sum_duplicates(self, ids, gradients, count);
    for (int64_t k = 0; k < distinct; k++) {
        if (k + AHEAD < distinct) {
            const char *next = (const char *)(self->rows + self->ids[k + AHEAD] * 3 * dim);
            for (int64_t byte = 0; byte < 3 * dim * 4; byte += 64) __builtin_prefetch(next + byte, 1);
        }
        float *restrict weight = self->rows + self->ids[k] * 3 * dim;
        float *restrict exp_avg = weight + dim, *restrict exp_avg_sq = weight + 2 * dim;
        const float *restrict gradient = self->sums + k * dim;
        for (int64_t i = 0; i < dim; i++) {
            exp_avg[i] += (1.0f - beta1) * (gradient[i] - exp_avg[i]);
            exp_avg_sq[i] += (1.0f - beta2) * (gradient[i] * gradient[i] - exp_avg_sq[i]);
            weight[i] -= step_size * exp_avg[i] / (sqrtf(exp_avg_sq[i]) + eps);
        }
    }
    return distinct;
}
