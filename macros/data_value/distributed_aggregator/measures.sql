{#-
    Measures that can be merged. The parts of a measure are its count, sum, minimum and maximum: the parts of two groups
    of rows give the parts of all their rows, whether a group is a task, a salt, a cell of a cube or a day. An average has
    no such rule, so it is divided last, and nothing is ever computed from it. A distinct count has none either, so there
    is no such measure.

    NULL, NaN, infinity and a value that is not `valid_when` are in no part; their rows are in `row_count`. A sum that its
    type can't hold is NULL, and so is every sum that is merged from it: SUM would fail with ANSI on and be a wrong number
    with ANSI off.

    Within a query the parts have names of our own (`lakehouse_patterns_…`); outside they are `<measure>_count`,
    `<measure>_sum`, `<measure>_min`, `<measure>_max` and `<measure>_avg`.
-#}

{% macro _measures(measures) %}
    {#- The argument as a list of {name, value, valid_when}. -#}
    {%- do lakehouse_patterns.require(
        measures is none or measures is mapping,
        "measures must map names to SQL expressions, such as {'duration': 'duration_seconds'}, got " ~ measures
    ) -%}
    {%- set checked = [] -%}
    {%- for name, given in (measures or {}).items() -%}
        {%- set measure = given if given is mapping else {'value': given} -%}
        {%- do lakehouse_patterns.require_known_keys("the measure '" ~ name ~ "'", measure, ['value', 'valid_when']) -%}
        {%- do lakehouse_patterns.require(
            measure.value is string and measure.value | trim and measure.get('valid_when', 'true') is string
            and measure.get('valid_when', 'true') | trim,
            "the measure '" ~ name ~ "' must be a SQL expression or {value, valid_when} of them, got " ~ given
        ) -%}
        {%- do checked.append({
            'name': name | string, 'value': measure.value, 'valid_when': measure.get('valid_when', 'true')
        }) -%}
    {%- endfor -%}
    {{ return(checked) }}
{% endmacro %}


{% macro _measure_columns(measures) %}
    {#- Of all measures, by the names of their parts: {name, helper}. -#}
    {%- set columns = [] -%}
    {%- for measure in measures -%}
        {%- set position = loop.index -%}
        {%- for part in ['count', 'sum', 'min', 'max'] -%}
            {%- do columns.append({
                'name': measure.name ~ '_' ~ part, 'helper': 'lakehouse_patterns_' ~ part ~ '_' ~ position
            }) -%}
        {%- endfor -%}
    {%- endfor -%}
    {{ return(columns) }}
{% endmacro %}


{% macro _require_names(macro_name, columns, measures) %}
    {#- Names of the result; no two may be the same column. -#}
    {%- set names = columns + ['row_count'] -%}
    {%- for measure in measures -%}
        {%- for part in ['count', 'sum', 'min', 'max', 'avg'] -%}
            {%- do names.append(measure.name ~ '_' ~ part) -%}
        {%- endfor -%}
    {%- endfor -%}
    {%- set lowered = [] -%}
    {%- for name in names -%}
        {%- do lakehouse_patterns.require(
            name is string and name | trim, macro_name ~ " needs names of columns, got '" ~ name ~ "'"
        ) -%}
        {%- do lakehouse_patterns.require(
            name | lower not in lowered,
            macro_name ~ " would give two columns the name '" ~ name ~ "'; rename a column in a query, or a measure"
        ) -%}
        {%- do lowered.append(name | lower) -%}
    {%- endfor -%}
{% endmacro %}


{% macro _measured_rows(relation, columns, measures, where=none) %}
    {#- The rows with `columns`, a list of select items, and each measure's value, NULL where it doesn't count. -#}
    select
        {{ columns | join(',\n        ') }}
        {%- for measure in measures %},
        {%- set value = 'lakehouse_patterns_given_' ~ loop.index %}
        case
            when typeof({{ value }}) not rlike '^(tinyint|smallint|int|bigint|float|double|decimal|void)'
                then raise_error(concat(
                    {{ lakehouse_patterns.text_literal(
                        "lakehouse_patterns: the measure '" ~ measure.name ~ "' must be a number, got "
                    ) }},
                    typeof({{ value }})
                ))
            when {{ measure.valid_when }} then {{ lakehouse_patterns._finite_or_null_sql(value) }}
        end as lakehouse_patterns_value_{{ loop.index }}
        {%- endfor %}
    from (
        select
            *
            {%- for measure in measures %},
            {{ measure.value }} as lakehouse_patterns_given_{{ loop.index }}
            {%- endfor %}
        from {{ relation }}
        {%- if where %}
        where {{ where }}
        {%- endif %}
    )
{%- endmacro %}


{% macro _first_parts(measures) %}
    {#- The parts of rows, for the select list of a group by. -#}
    count(*) as lakehouse_patterns_rows
    {%- for measure in measures %}
    {%- set value = 'lakehouse_patterns_value_' ~ loop.index %},
    count({{ value }}) as lakehouse_patterns_count_{{ loop.index }},
    try_sum({{ value }}) as lakehouse_patterns_sum_{{ loop.index }},
    min({{ value }}) as lakehouse_patterns_min_{{ loop.index }},
    max({{ value }}) as lakehouse_patterns_max_{{ loop.index }}
    {%- endfor %}
{%- endmacro %}


{% macro _merged_parts(measures) %}
    {#- The parts of groups whose parts are given. Without any group there are 0 rows. -#}
    coalesce(sum(lakehouse_patterns_rows), 0) as lakehouse_patterns_rows
    {%- for measure in measures %}
    {%- set count, sum = 'lakehouse_patterns_count_' ~ loop.index, 'lakehouse_patterns_sum_' ~ loop.index %},
    coalesce(sum({{ count }}), 0) as {{ count }},
    case
        when count_if({{ count }} > 0 and {{ sum }} is null) = 0 then try_sum({{ sum }})
    end as {{ sum }},
    min(lakehouse_patterns_min_{{ loop.index }}) as lakehouse_patterns_min_{{ loop.index }},
    max(lakehouse_patterns_max_{{ loop.index }}) as lakehouse_patterns_max_{{ loop.index }}
    {%- endfor %}
{%- endmacro %}


{% macro _named_parts(measures) %}
    {#- The parts by their public names, and the averages. -#}
    lakehouse_patterns_rows as row_count
    {%- for column in lakehouse_patterns._measure_columns(measures) %},
    {{ column.helper }} as {{ lakehouse_patterns.quoted_name(column.name) }}
    {%- endfor %}
    {%- for measure in measures %},
    try_divide(lakehouse_patterns_sum_{{ loop.index }}, lakehouse_patterns_count_{{ loop.index }})
        as {{ lakehouse_patterns.quoted_name(measure.name ~ '_avg') }}
    {%- endfor %}
{%- endmacro %}


{% macro _stored_parts(measures) %}
    {#- The public names back again. -#}
    row_count as lakehouse_patterns_rows
    {%- for column in lakehouse_patterns._measure_columns(measures) %},
    {{ lakehouse_patterns.quoted_name(column.name) }} as {{ column.helper }}
    {%- endfor %}
{%- endmacro %}


{% macro _required_type(value, types, message) %}
    {#- A value of one of these types; reading NULL, or any value of another type, fails with the message. -#}
    {{ return(
        'case when typeof(' ~ value ~ ') not in (' ~ lakehouse_patterns.text_literals(types)
        ~ ') then raise_error(concat(' ~ lakehouse_patterns.text_literal(message ~ ', got ') ~ ', typeof(' ~ value
        ~ '))) when (' ~ value ~ ') is null then raise_error('
        ~ lakehouse_patterns.text_literal(message ~ ', a row has NULL; leave it out, or correct it')
        ~ ') else ' ~ value ~ ' end'
    ) }}
{% endmacro %}
