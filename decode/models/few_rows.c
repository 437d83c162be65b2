/* y = x W^T (+ add) in float32, for the few rows x that decoding has: each weight is read once, whatever the rows.

   W lies in panels of 16 outputs: w[output / 16][input][output % 16]. x is [count, inputs], y and add [count, outputs];
   outputs are a multiple of 16, count is at most 16, add may be null. */

typedef float panel __attribute__((vector_size(64), aligned(4)));

#define AHEAD 128 /* vectors: how far ahead of its use a weight is asked for */

static inline __attribute__((always_inline)) void some_panels(
    const float *w, const float *x, const float *add, float *y, long inputs, long outputs, long from, long to,
    const int count)
{
    for (long p = from; p < to; p++) {
        const float *at = w + p * inputs * 16;
        panel sums[count];
        for (int row = 0; row < count; row++)
            sums[row] = (panel){0};
        for (long i = 0; i < inputs; i++) {
            panel weight = *(const panel *)(at + i * 16);
            __builtin_prefetch(at + (i + AHEAD) * 16);
            for (int row = 0; row < count; row++)
                sums[row] += weight * x[row * inputs + i];
        }
        for (int row = 0; row < count; row++) {
            long place = row * outputs + p * 16;
            if (add)
                sums[row] += *(const panel *)(add + place);
            *(panel *)(y + place) = sums[row];
        }
    }
}

void few_rows(
    const float *w, const float *x, const float *add, float *y, long inputs, long outputs, int count, int threads)
{
    long panels = outputs / 16;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int thread = 0; thread < threads; thread++) {
        long from = panels * thread / threads, to = panels * (thread + 1) / threads;
#define CASE(count) \
    case count: \
        some_panels(w, x, add, y, inputs, outputs, from, to, count); \
        break;
        switch (count) { /* each with its number of rows known, so that the sums stay in registers */
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
            CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14) CASE(15) CASE(16)
        }
    }
}
