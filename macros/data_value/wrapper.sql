{#-
    Wrapper: the original record stays untouched, and the computed values are stored apart from it.

    Every layout is a view of one normal form, a row of two structs, `raw` and `computed`; so a layout is one
    branch of `_wrapper_layout`, reading it back one branch of `_wrapper_normal`, and any way round returns the same
    rows. Spark's optimizer dissolves the structs: a query reads only the columns that it asks for.
-#}

{% macro wrapper(
    relation,
    computed,
    layout='computed_struct',
    computable_when=none,
    key=none,
    part=none,
    raw_name='raw',
    computed_name='decorated',
    prefix='computed_'
) %}
    {{ return(adapter.dispatch('wrapper', 'lakehouse_patterns')(
        relation, computed, layout, computable_when, key, part, raw_name, computed_name, prefix
    )) }}
{% endmacro %}

{% macro default__wrapper(
    relation, computed, layout, computable_when, key, part, raw_name, computed_name, prefix
) %}
    {%- do lakehouse_patterns.require(
        computed is mapping and computed, 'computed of wrapper must map names to SQL expressions, got ' ~ computed
    ) -%}
    {%- do lakehouse_patterns.require(
        not computable_when or lakehouse_patterns.column_name(computed, 'computation_failed') is none,
        "computed of wrapper must not hold 'computation_failed', the flag that computable_when adds"
    ) -%}
    {%- set names = {'raw': raw_name, 'computed': computed_name, 'prefix': prefix} -%}
    {%- set fields = computed.keys() | list + (['computation_failed'] if computable_when else []) -%}
    {%- do lakehouse_patterns._wrapper_require_free_names(
        lakehouse_patterns.known_types(relation), layout, fields, names
    ) -%}
    {%- set rows -%}
select
    struct(*) as raw,
    named_struct(
        {%- for name, expression in computed.items() %}
        {{ lakehouse_patterns.text_literal(name) }},
        {%- if computable_when %}
        {#- Lazy: where the condition does not hold, nothing is evaluated that could raise. #}
        case when {{ computable_when }} then {{ expression }} end
        {%- else %}
        {{ expression }}
        {%- endif %}{{ ',' if not loop.last or computable_when }}
        {%- endfor %}
        {%- if computable_when %}
        'computation_failed',
        ({{ computable_when }}) is not true
        {%- endif %}
    ) as computed
from {{ relation }}
    {%- endset -%}
    {{ return(lakehouse_patterns._wrapper_layout(rows, layout, fields, key, part, names)) }}
{% endmacro %}


{% macro rewrap(
    relation,
    from_layout,
    to_layout,
    computed,
    key=none,
    part=none,
    computed_relation=none,
    raw_name='raw',
    computed_name='decorated',
    prefix='computed_'
) %}
    {{ return(adapter.dispatch('rewrap', 'lakehouse_patterns')(
        relation, from_layout, to_layout, computed, key, part, computed_relation, raw_name, computed_name, prefix
    )) }}
{% endmacro %}

{% macro default__rewrap(
    relation, from_layout, to_layout, computed, key, part, computed_relation, raw_name, computed_name, prefix
) %}
    {%- set names = {'raw': raw_name, 'computed': computed_name, 'prefix': prefix} -%}
    {%- set fields = computed | list -%}
    {%- set rows = lakehouse_patterns._wrapper_normal(relation, from_layout, fields, key, computed_relation, names) -%}
    {{ return(lakehouse_patterns._wrapper_layout(rows, to_layout, fields, key, part, names)) }}
{% endmacro %}


{% macro unwrap(
    relation, layout, computed, raw_name='raw', computed_name='decorated', prefix='computed_'
) %}
    {{ return(adapter.dispatch('unwrap', 'lakehouse_patterns')(
        relation, layout, computed, raw_name, computed_name, prefix
    )) }}
{% endmacro %}

{% macro default__unwrap(relation, layout, computed, raw_name, computed_name, prefix) %}
    {%- do lakehouse_patterns.require(
        layout != 'two_tables', 'unwrap has nothing to do for layout two_tables: its raw table is the original'
    ) -%}
    {%- set names = {'raw': raw_name, 'computed': computed_name, 'prefix': prefix} -%}
select raw.*
from (
    {{ lakehouse_patterns._wrapper_normal(relation, layout, computed | list, none, none, names) | indent(4) }}
)
{%- endmacro %}


{% macro _wrapper_require_free_names(types, layout, fields, names) %}
    {#- What a layout puts beside the original columns, or beside the computed ones. -#}
    {%- if layout == 'computed_struct' -%}
        {%- do lakehouse_patterns.require_free_names(
            types, [names.computed], 'wrapper', 'pass another name as computed_name'
        ) -%}
    {%- elif layout == 'raw_struct' -%}
        {%- do lakehouse_patterns.require_free_names(fields, [names.raw], 'wrapper', 'pass another name as raw_name') -%}
    {%- elif layout == 'flat' -%}
        {%- set flat = [] -%}
        {%- for name in fields -%}
            {%- do flat.append(names.prefix ~ name) -%}
        {%- endfor -%}
        {%- do lakehouse_patterns.require_free_names(types, flat, 'wrapper', 'pass another prefix') -%}
    {%- endif -%}
{% endmacro %}


{% macro _wrapper_layout(rows, layout, fields, key, part, names) %}
    {#- Rows of the normal form as one layout. -#}
    {%- do lakehouse_patterns.require_one_of(
        'layout of wrapper', layout, ['computed_struct', 'raw_struct', 'flat', 'two_tables']
    ) -%}
    {%- set keys = lakehouse_patterns.as_list(key) -%}
    {%- if layout == 'two_tables' -%}
        {%- do lakehouse_patterns.require(keys, 'layout two_tables needs key, the unique key that joins the tables') -%}
        {%- do lakehouse_patterns.require_one_of('part of layout two_tables', part, ['raw', 'computed']) -%}
        {%- do lakehouse_patterns.require(
            lakehouse_patterns.names_without_case(fields, keys) == fields,
            'a computed value must not have the name of a key column'
        ) -%}
    {%- else -%}
        {%- do lakehouse_patterns.require(
            not part, "part is for layout two_tables, got '" ~ part ~ "' with layout " ~ layout
        ) -%}
    {%- endif -%}
select
    {%- if layout == 'computed_struct' %}
    raw.*,
    computed as {{ lakehouse_patterns.quoted_name(names.computed) }}
    {%- elif layout == 'raw_struct' %}
    computed.*,
    raw as {{ lakehouse_patterns.quoted_name(names.raw) }}
    {%- elif layout == 'flat' %}
    raw.*
    {%- for name in fields %},
    {{ lakehouse_patterns.quoted_name(name, 'computed') }}
        as {{ lakehouse_patterns.quoted_name(names.prefix ~ name) }}
    {%- endfor %}
    {%- elif part == 'raw' %}
    raw.*
    {%- else %}
    {%- for name in keys %}
    {{ lakehouse_patterns.quoted_name(name, 'raw') }} as {{ lakehouse_patterns.quoted_name(name) }},
    {%- endfor %}
    computed.*
    {%- endif %}
from (
    {{ rows | indent(4) }}
)
{%- endmacro %}


{% macro _wrapper_normal(relation, layout, fields, key, computed_relation, names) %}
    {#- One layout as rows of the normal form. -#}
    {%- do lakehouse_patterns.require_one_of(
        'layout to read', layout, ['computed_struct', 'raw_struct', 'flat', 'two_tables']
    ) -%}
    {%- set keys = lakehouse_patterns.as_list(key) -%}
select
    {%- if layout == 'computed_struct' %}
    struct(* except ({{ lakehouse_patterns.quoted_name(names.computed) }})) as raw,
    {{ lakehouse_patterns.quoted_name(names.computed) }} as computed
from {{ relation }}
    {%- elif layout == 'raw_struct' %}
    {{ lakehouse_patterns.quoted_name(names.raw) }} as raw,
    struct(* except ({{ lakehouse_patterns.quoted_name(names.raw) }})) as computed
from {{ relation }}
    {%- elif layout == 'flat' %}
    struct(* except (
        {%- for name in fields %}{{ lakehouse_patterns.quoted_name(names.prefix ~ name) }}{{ ', ' if not loop.last }}
        {%- endfor -%}
    )) as raw,
    struct(
        {%- for name in fields %}
        {{- lakehouse_patterns.quoted_name(names.prefix ~ name) }} as {{ lakehouse_patterns.quoted_name(name) }}
        {{- ', ' if not loop.last }}
        {%- endfor -%}
    ) as computed
from {{ relation }}
    {%- else -%}
    {%- do lakehouse_patterns.require(
        keys and computed_relation, 'reading layout two_tables needs key and computed_relation'
    ) %}
    struct(raw_rows.*) as raw,
    struct(computed_rows.* except ({{ lakehouse_patterns.quoted_names(keys) | join(', ') }})) as computed
from {{ relation }} as raw_rows
-- The original survives when its computed row is missing; the test wrapper_one_to_one finds that.
left join {{ computed_relation }} as computed_rows
    on
        {%- for name in lakehouse_patterns.quoted_names(keys) %}
        {{ 'and ' if not loop.first }}raw_rows.{{ name }} = computed_rows.{{ name }}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}


{% test wrapper_one_to_one(model, computed_relation, key) %}
    {#- Layout two_tables joins without loss only if each key is in each table exactly once and never NULL. -#}
    {%- set keys = lakehouse_patterns.quoted_names(lakehouse_patterns.as_list(key)) -%}
    {%- do lakehouse_patterns.require(keys, 'wrapper_one_to_one needs key') -%}
select
    {{ keys | join(', ') }},
    sum(lakehouse_patterns_raw) as rows_in_raw,
    sum(lakehouse_patterns_computed) as rows_in_computed
from (
    select {{ keys | join(', ') }}, 1 as lakehouse_patterns_raw, 0 as lakehouse_patterns_computed
    from {{ model }}
    union all
    select {{ keys | join(', ') }}, 0 as lakehouse_patterns_raw, 1 as lakehouse_patterns_computed
    from {{ computed_relation }}
)
group by {{ keys | join(', ') }}
having
    sum(lakehouse_patterns_raw) != 1
    or sum(lakehouse_patterns_computed) != 1
    {%- for name in keys %}
    or {{ name }} is null
    {%- endfor %}
{% endtest %}


{% test no_wrapped_columns(model, names=['raw', 'decorated']) %}
    {#- Fails with one row for each struct of the envelope that a final table still exposes. -#}
{{ lakehouse_patterns._exposed_columns_sql(model, names, type='struct') }}
{% endtest %}
