/* Sixteen numbers of float32 side by side, and what is computed of them. */

#include <math.h>

typedef float panel __attribute__((vector_size(64), aligned(4)));
typedef int integers __attribute__((vector_size(64), aligned(4)));

static inline panel larger(panel x, panel y)
{
    integers above = x > y;
    return (panel)(((integers)x & above) | ((integers)y & ~above));
}

static inline panel within(panel x, float most)
{
    integers above = x > most, below = x < -most;
    panel edge = (panel){0} + most;
    return (panel)(((integers)x & ~(above | below)) | ((integers)edge & above) | ((integers)-edge & below));
}

/* e^x within two units of the last place, by Cody and Waite's reduction; beyond 87 either way that of 87 */
static inline panel exponential(panel x)
{
    x = within(x, 87.0f);
    panel powers = x * 1.44269504f + 12582912.0f - 12582912.0f; /* rounded to integers */
    panel rest = x - powers * 0.693359375f + powers * 2.12194440e-4f;
    panel sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    return sum * (panel)((__builtin_convertvector(powers, integers) + 127) << 23);
}

static inline float total(panel x)
{
    float sum = 0;
    for (int lane = 0; lane < 16; lane++)
        sum += x[lane];
    return sum;
}

/* The totals of sixteen, in their order: neighbours are added, of two panels beside each other, until one is left. */
static inline panel totals(const panel of[16])
{
#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
#define EACH_SECOND(a, b, n) \
    __builtin_shufflevector( \
        a, b, n, n + 2, n + 4, n + 6, n + 8, n + 10, n + 12, n + 14, n + 16, n + 18, n + 20, n + 22, n + 24, n + 26, \
        n + 28, n + 30)
    panel x[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        x[i] = of[i];
#pragma GCC unroll 4
    for (int number = 8; number; number /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < number; i++)
            x[i] = EACH_SECOND(x[2 * i], x[2 * i + 1], 0) + EACH_SECOND(x[2 * i], x[2 * i + 1], 1);
    return x[0];
#else
    panel sums;
    for (int i = 0; i < 16; i++)
        sums[i] = total(of[i]);
    return sums;
#endif
}
