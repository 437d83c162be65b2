/* Decoder layers for few tokens, one after another, in float32: few_rows.c and attention.c say what their parts are.

   hidden and result are [batch * count, inputs]; the first layer's queries, keys and values may be given. The four
   weights of a layer are as few_rows takes them; its norms' weights may be null. work has room for a row's queries, keys
   and values, what they read, gates and values of the MLP, and a hidden row, for all rows. */

#include <stddef.h>

typedef struct {
    const char *qkv, *out, *gate_up, *down;
    const float *norm_in, *norm_mlp;
    float *keys, *values;
} layer;

void few_rows(
    const char *w, const float *given, const float *add, float *y, long inputs, long outputs, int count, int kind,
    int threads, const float *norm, float offset, int gated);
void attend(
    const float *qkv, const float *turns, const float *mask, float *keys, float *values, const long *lengths,
    float *attended, long rows_of_turns, long rows_of_mask, long row_apart, long head_apart, int batch, int count,
    int heads, int groups, int width, int start, int stop, int end, int threads);

void layers(
    const layer *all, const float *hidden, const float *first_qkv, float *work, float *result, const float *turns,
    const float *mask, const long *lengths, long rows_of_turns, long rows_of_mask, long row_apart, long head_apart,
    long inputs, long mlp, int number, int kind, int batch, int count, int heads, int groups, int width, int start,
    int end, int threads, float offset)
{
    const long read = (long)heads * width, asked = read + 2L * groups * width;
    const int rows = batch * count;
    float *own_qkv = work, *attended = own_qkv + rows * asked, *gates = attended + rows * read;
    float *between = gates + rows * 2 * mlp;
    for (int number_of = 0; number_of < number; number_of++) {
        const layer *one = all + number_of;
        const float *qkv = number_of == 0 && first_qkv ? first_qkv : own_qkv;
        if (qkv == own_qkv)
            few_rows(one->qkv, hidden, NULL, own_qkv, inputs, asked, rows, kind, threads, one->norm_in, offset, 0);
        attend(
            qkv, turns, mask, one->keys, one->values, lengths, attended, rows_of_turns, rows_of_mask, row_apart, head_apart,
            batch, count, heads, groups, width, start, start + count, end, threads);
        few_rows(one->out, attended, hidden, between, read, inputs, rows, kind, threads, NULL, -1, 0);
        few_rows(one->gate_up, between, NULL, gates, inputs, 2 * mlp, rows, kind, threads, one->norm_mlp, offset, 0);
        few_rows(one->down, gates, between, result, mlp, inputs, rows, kind, threads, NULL, -1, 1);
        hidden = result;
    }
}
