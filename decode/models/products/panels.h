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

/* The totals of sixteen, in their order. */
static inline panel totals(const panel x[16])
{
#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
    panel two[8], four[4], eight[2];
#define PAIRS(a, b) \
    (__builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) + \
     __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
#define FOURS(a, b) \
    (__builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) + \
     __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
#define EIGHTS(a, b) \
    (__builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) + \
     __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
#define HALVES(a, b) \
    (__builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) + \
     __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        two[i] = PAIRS(x[2 * i], x[2 * i + 1]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        four[i] = FOURS(two[2 * i], two[2 * i + 1]);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        eight[i] = EIGHTS(four[2 * i], four[2 * i + 1]);
    return HALVES(eight[0], eight[1]);
#else
    panel sums;
    for (int i = 0; i < 16; i++)
        sums[i] = total(x[i]);
    return sums;
#endif
}
