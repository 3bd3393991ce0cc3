{#-
    SCD Type 2: the changes that a batch brings and those that the table keeps, in one shape: key_1, key_2, …,
    changed_at, sequence, is_deleted, tracked, untracked, stored_row. A model's own columns stand inside of the structs
    tracked and untracked, so that none has the name of a helper.
-#}

{% macro _scd2_arrived(history, batch) %}
    {%- set deleted = 'batch.' ~ lakehouse_patterns.quoted_name(history.is_deleted) if history.is_deleted else 'false' -%}
select
    {%- for name in lakehouse_patterns.quoted_names(history.key, 'batch') %}
    {{ name }} as key_{{ loop.index }},
    {%- endfor %}
    batch.{{ lakehouse_patterns.quoted_name(history.changed_at) }} as changed_at,
    {%- if history.sequence %}
    batch.{{ lakehouse_patterns.quoted_name(history.sequence) }} as sequence,
    {%- endif %}
    {#- In a column that nothing filters on, or the optimizer would ask before quarantined rows are left out. #}
    case
        when {{ lakehouse_patterns.is_incomplete(history.incomplete, 'batch') }}
            then {{ lakehouse_patterns.refuse_incomplete(history.incomplete, 'batch', 'change') }}
        else {{ deleted }}
    end as is_deleted,
    if({{ deleted }}, null, {{ lakehouse_patterns._scd2_struct(history.tracked, 'batch', history.absent) }}) as tracked,
    {%- if history.untracked %}
    {{ lakehouse_patterns._scd2_struct(history.untracked, 'batch', history.absent) }} as untracked,
    {%- endif %}
    null as stored_row
from {{ lakehouse_patterns.rows_as_stored(history.incomplete, batch) }} as batch
{{- lakehouse_patterns.without_quarantined(history.incomplete, 'batch') }}
{%- endmacro %}


{% macro _scd2_stored_changes(history, target) %}
    {#- The changes of the batch's keys. The first change of a row carries the row as it is. -#}
    {%- set tracked = 'if(exploded.change.is_deleted, null, '
        ~ lakehouse_patterns._scd2_struct(history.tracked, 'stored') ~ ')' -%}
    {%- set matches = [] -%}
    {%- for name in lakehouse_patterns.quoted_names(history.key, 'stored') -%}
        {%- do matches.append(name ~ ' = arrived.key_' ~ loop.index) -%}
    {%- endfor -%}
select
    {%- for name in lakehouse_patterns.quoted_names(history.key, 'stored') %}
    {{ name }} as key_{{ loop.index }},
    {%- endfor %}
    exploded.change.changed_at,
    {%- if history.sequence %}
    exploded.change.sequence,
    {%- endif %}
    exploded.change.is_deleted,
    {{ tracked }} as tracked,
    {%- if history.untracked %}
    exploded.change.untracked,
    {%- endif %}
    if(
        exploded.position = 0,
        struct({{ tracked }} as tracked, stored.effective_to as effective_to, stored.changes as changes),
        null
    ) as stored_row
from {{ target }} as stored
left semi join arrived
    on {{ matches | join(' and ') }}
lateral view posexplode(stored.changes) exploded as position, change
{%- endmacro %}


{% macro _scd2_struct(columns, alias, absent=[]) %}
    {#- The columns as one struct: `<=>` and `order by` on it are NULL-safe and total. -#}
    {%- set fields = [] -%}
    {%- for name, type in columns.items() -%}
        {%- set quoted = lakehouse_patterns.quoted_name(name) -%}
        {%- do fields.append(
            'cast(null as ' ~ type ~ ') as ' ~ quoted if name in absent else alias ~ '.' ~ quoted ~ ' as ' ~ quoted
        ) -%}
    {%- endfor -%}
    {{ return('struct(' ~ (fields | join(', ')) ~ ')') }}
{% endmacro %}
