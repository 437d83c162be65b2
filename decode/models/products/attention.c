/* Attention of few new tokens to a cache that their keys and values are written to first, all in float32.

   qkv [batch, count, heads + 2 * groups, width] holds queries, keys and values side by side; queries and keys are turned by
   turns [rows_of_turns, count, width], cosine and sine of each pair of neighbours. Keys and values lie in caches whose rows
   and heads are so many numbers apart; token m of a row goes to slot lengths[row] + start + m, and sees the slots up to
   lengths[row] + stop, with mask [rows_of_mask, count, end] added to its scores, if there is one. rows_of_* are 1 or batch.
   width is a multiple of 16. What is read lies in attended [batch, count, heads, width]. */

#include "panels.h"

static inline void turn(const float *from, const float *by, float *to, long width)
{
    for (long e = 0; e < width; e += 2) {
        to[e] = from[e] * by[e] - from[e + 1] * by[e + 1];
        to[e + 1] = from[e] * by[e + 1] + from[e + 1] * by[e];
    }
}

static void attend_once(
    const float *query, const float *keys, const float *values, const float *mask, float *attended, long slots, long width)
{
    const long padded = (slots + 15) / 16 * 16;
    float scores[padded];
    float most = -INFINITY, sum = 0;
    for (long s = 0; s < slots; s++) {
        panel products = {0};
        for (long e = 0; e < width; e += 16)
            products += *(const panel *)(query + e) * *(const panel *)(keys + s * width + e);
        scores[s] = total(products) + (mask ? mask[s] : 0.0f);
        most = scores[s] > most ? scores[s] : most;
    }
    for (long s = slots; s < padded; s++)
        scores[s] = -INFINITY;
    panel sums = {0};
    for (long s = 0; s < padded; s += 16) {
        panel shifted = *(panel *)(scores + s) - most;
        integers seen = shifted > -87.0f; /* the rest would be less than 2^-125 of the largest */
        panel shares = (panel)((integers)exponential(shifted) & seen);
        *(panel *)(scores + s) = shares;
        sums += shares;
    }
    sum = 1.0f / total(sums);
    for (long e = 0; e < width; e += 16) {
        panel even = {0}, odd = {0};
        long s = 0;
        for (; s + 1 < slots; s += 2) {
            even += scores[s] * *(const panel *)(values + s * width + e);
            odd += scores[s + 1] * *(const panel *)(values + (s + 1) * width + e);
        }
        if (s < slots)
            even += scores[s] * *(const panel *)(values + s * width + e);
        *(panel *)(attended + e) = (even + odd) * sum;
    }
}

void attend(
    const float *qkv, const float *turns, const float *mask, float *keys, float *values, const long *lengths,
    float *attended, long rows_of_turns, long rows_of_mask, long row_apart, long head_apart, int batch, int count, int heads,
    int groups, int width, int start, int stop, int end, int threads)
{
    const long token = (long)(heads + 2 * groups) * width;
    const float scale = 1.0f / sqrtf((float)width);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int task = 0; task < batch * count * groups; task++) {
            const int row = task / (count * groups), m = task / groups % count, group = task % groups;
            const float *given = qkv + ((long)row * count + m) * token;
            const float *by = turns + ((rows_of_turns > 1 ? row : 0) * (long)count + m) * width;
            const long at = row * row_apart + group * head_apart + (lengths[row] + start + m) * width;
            turn(given + (heads + group) * (long)width, by, keys + at, width);
            for (int e = 0; e < width; e++)
                values[at + e] = given[(heads + groups + group) * (long)width + e];
        }
#pragma omp for schedule(static)
        for (int task = 0; task < batch * count * heads; task++) {
            const int row = task / (count * heads), head = task / count % heads, m = task % count;
            const float *given = qkv + ((long)row * count + m) * token + (long)head * width;
            const float *by = turns + ((rows_of_turns > 1 ? row : 0) * (long)count + m) * width;
            const long at = row * row_apart + head / (heads / groups) * head_apart;
            const float *added = mask ? mask + ((rows_of_mask > 1 ? row : 0) * (long)count + m) * end : 0;
            float query[width];
            turn(given, by, query, width);
            for (int e = 0; e < width; e++)
                query[e] *= scale;
            attend_once(
                query, keys + at, values + at, added, attended + (((long)row * count + m) * heads + head) * width,
                lengths[row] + stop, width);
        }
    }
}
